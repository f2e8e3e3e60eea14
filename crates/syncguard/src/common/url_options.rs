//! The options in the query of a URL.

use std::str::FromStr;
#[cfg(any(
    feature = "firestore",
    feature = "postgres",
    feature = "redis",
    feature = "sqlite"
))]
use std::time::Duration;

use super::error::{Error, Result};

/// Options that wait to be taken. Messages name known options and never a value, which may be secret.
#[derive(Clone)]
pub(crate) struct UrlOptions(Vec<(String, String)>);

impl UrlOptions {
    /// Splits a URL from its options. A fragment is refused, because nothing here has one.
    pub(crate) fn split(url: &str) -> Result<(&str, Self)> {
        if url.contains('#') {
            return Err(Error::invalid("the URL must not contain \"#\"; write %23 for it"));
        }
        let (rest, query) = url.split_once('?').unwrap_or((url, ""));
        let options = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        Ok((rest, Self(options)))
    }

    /// Takes an option; an option that is given twice is an error.
    pub(crate) fn take(&mut self, name: &str) -> Result<Option<String>> {
        let mut found = self.0.extract_if(.., |(option, _)| option == name);
        let first = found.next().map(|(_, value)| value);
        match found.count() {
            0 => Ok(first),
            _ => Err(Error::invalid(format!("the URL has the option \"{name}\" twice"))),
        }
    }

    /// Takes an option of another type.
    pub(crate) fn take_as<T: FromStr>(&mut self, name: &str, what: &str) -> Result<Option<T>> {
        let parse = |value: String| {
            let parsed = value.parse();
            parsed.map_err(|_cause| Error::invalid(format!("the option \"{name}\" is no {what}")))
        };
        self.take(name)?.map(parse).transpose()
    }

    /// Takes a number of milliseconds.
    #[cfg(any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite"))]
    pub(crate) fn take_millis(&mut self, name: &str) -> Result<Option<Duration>> {
        let millis = self.take_as::<u64>(name, "number of milliseconds")?;
        Ok(millis.map(Duration::from_millis))
    }

    /// Takes the content of a file that an option names.
    #[cfg(any(feature = "postgres", feature = "redis"))]
    pub(crate) fn take_file(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(path) = self.take(name)? else { return Ok(None) };
        let unreadable = |cause: std::io::Error| {
            Error::invalid(format!("the file that \"{name}\" names cannot be read"))
                .with_source(cause)
        };
        std::fs::read(path).map(Some).map_err(unreadable)
    }

    /// Refuses what nobody has taken.
    pub(crate) fn finish(self, known: &str) -> Result<()> {
        // Its name is not told: after a question mark that should have been escaped, it may be a
        // part of a password.
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(format!("the URL has an unknown option; there are: {known}")))
    }
}

#[cfg(all(
    test,
    any(feature = "firestore", feature = "postgres", feature = "redis", feature = "sqlite")
))]
mod tests {
    use super::*;

    #[test]
    fn options_are_taken_once_and_unknown_ones_refused() {
        let (rest, mut options) = UrlOptions::split("x://y/z?a=1%20&b=2").expect("a URL");
        assert_eq!(rest, "x://y/z");
        assert_eq!(options.take("a").expect("once").as_deref(), Some("1 "));
        assert_eq!(options.take("a").expect("gone"), None);
        let error = options.clone().finish("a").expect_err("b is left");
        assert!(error.to_string().ends_with("there are: a"), "{error}");
        assert_eq!(options.take_millis("b").expect("a number"), Some(Duration::from_millis(2)));
        options.finish("a, b").expect("nothing is left");
        let (_, mut twice) = UrlOptions::split("x:?a=1&a=2").expect("a URL");
        assert!(twice.take("a").is_err());
        let (_, mut number) = UrlOptions::split("x:?a=canary").expect("a URL");
        let error = number.take_millis("a").expect_err("no number").to_string();
        assert!(!error.contains("canary"), "{error}");
        assert!(UrlOptions::split("x:#y").is_err());
    }
}
