//! Names of tables, which become part of SQL statements.

use super::error::{Error, Result};

/// The maximum length of a name; PostgreSQL truncates longer ones.
pub(crate) const LIMIT_BYTES: usize = 63;

/// Fails unless a name consists of letters, digits and underscores, and does not begin with a
/// digit. Such a name can be quoted without escapes.
pub(crate) fn check(name: &str) -> Result<()> {
    let is_letter = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
    let is_name = name.starts_with(is_letter)
        && name.chars().all(|letter| is_letter(letter) || letter.is_ascii_digit());
    if is_name && name.len() <= LIMIT_BYTES {
        return Ok(());
    }
    Err(Error::invalid(
        "invalid table name; expected table or schema.table, each at most 63 letters, digits and \
         underscores, not beginning with a digit",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_letters_digits_and_underscores_and_begins_with_no_digit() {
        let longest = "a".repeat(LIMIT_BYTES);
        for valid in ["a", "_", "Locks_2", "_9", &longest] {
            assert!(check(valid).is_ok(), "{valid}");
        }
        let too_long = "a".repeat(LIMIT_BYTES + 1);
        for invalid in ["", "9a", "a-b", "a b", "a\"b", "é", "aé", "a.b", &too_long] {
            assert!(check(invalid).is_err(), "{invalid}");
        }
    }
}
