//! The options in the query string of a URL.

use std::str::FromStr;
#[cfg(feature = "_store")]
use std::time::Duration;

use super::error::{Error, Result};

/// The options that have not been taken yet. Error messages name known options and never a value,
/// which may be secret.
#[derive(Clone)]
pub(crate) struct UrlOptions(Vec<(String, String)>);

impl UrlOptions {
    /// Splits a URL into the part before the query and its options. A fragment is an error, because
    /// no backend uses one.
    pub(crate) fn split(url: &str) -> Result<(&str, Self)> {
        if url.contains('#') {
            return Err(Error::invalid("the URL must not contain \"#\"; write %23 instead"));
        }
        let (rest, query) = url.split_once('?').unwrap_or((url, ""));
        let options = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        Ok((rest, Self(options)))
    }

    /// Takes an option. An option that appears twice is an error.
    pub(crate) fn take(&mut self, name: &str) -> Result<Option<String>> {
        let mut found = self.0.extract_if(.., |(option, _)| option == name);
        let first = found.next().map(|(_, value)| value);
        match found.count() {
            0 => Ok(first),
            _ => Err(Error::invalid(format!("the URL has the option \"{name}\" more than once"))),
        }
    }

    /// Takes an option and parses it. `what` describes the expected value.
    pub(crate) fn take_as<T: FromStr>(&mut self, name: &str, what: &str) -> Result<Option<T>> {
        let parse = |value: String| {
            let parsed = value.parse();
            parsed.map_err(|_cause| {
                Error::invalid(format!("invalid URL option \"{name}\": expected {what}"))
            })
        };
        self.take(name)?.map(parse).transpose()
    }

    /// Takes a number of milliseconds.
    #[cfg(feature = "_store")]
    pub(crate) fn take_millis(&mut self, name: &str) -> Result<Option<Duration>> {
        let millis = self.take_as::<u64>(name, "a number of milliseconds")?;
        Ok(millis.map(Duration::from_millis))
    }

    /// Takes an option that names a file, and reads the file.
    #[cfg(feature = "_listener")]
    pub(crate) fn take_file(&mut self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(path) = self.take(name)? else { return Ok(None) };
        let unreadable = |cause: std::io::Error| {
            Error::invalid(format!("cannot read the file in the URL option \"{name}\""))
                .with_source(cause)
        };
        std::fs::read(path).map(Some).map_err(unreadable)
    }

    /// Fails if an option has not been taken.
    pub(crate) fn finish(self, known: &str) -> Result<()> {
        // The message does not name the unknown option: after an unescaped question mark, it may be
        // part of a password.
        if self.0.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(format!("the URL has an unknown option; known options: {known}")))
    }
}

#[cfg(all(test, feature = "_store"))]
mod tests {
    use super::*;

    #[test]
    fn options_are_taken_once_and_unknown_ones_refused() {
        let (rest, mut options) = UrlOptions::split("x://y/z?a=1%20&b=2").expect("a URL");
        assert_eq!(rest, "x://y/z");
        assert_eq!(options.take("a").expect("once").as_deref(), Some("1 "));
        assert_eq!(options.take("a").expect("gone"), None);
        let error = options.clone().finish("a").expect_err("b is left");
        assert!(error.message().ends_with("known options: a"), "{error}");
        assert_eq!(options.take_millis("b").expect("a number"), Some(Duration::from_millis(2)));
        options.finish("a, b").expect("nothing is left");
        let (_, mut twice) = UrlOptions::split("x:?a=1&a=2").expect("a URL");
        assert!(twice.take("a").is_err());
        let (_, mut number) = UrlOptions::split("x:?a=canary").expect("a URL");
        let error = number.take_millis("a").expect_err("not a number").to_string();
        assert!(!error.contains("canary"), "{error}");
        assert!(UrlOptions::split("x:#y").is_err());
    }

    #[cfg(feature = "_listener")]
    #[test]
    fn a_file_is_read_and_a_missing_one_is_an_error() {
        let url = "x:?file=Cargo.toml&gone=/no/such/canary";
        let (_, mut options) = UrlOptions::split(url).expect("a URL");
        let content = options.take_file("file").expect("readable").expect("given");
        assert!(content.starts_with(b"[package]"));
        assert_eq!(options.take_file("file").expect("gone"), None);
        let error = options.take_file("gone").expect_err("no such file").to_string();
        assert!(!error.contains("canary"), "{error}");
    }
}
