//! Replaces texts in a stream of bytes, whose parts end anywhere.

use std::borrow::Cow;

/// Replaces texts by others of the same length.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rewriter {
    texts: Vec<(Vec<u8>, Vec<u8>)>,
    /// The end of the data so far, with which a text may begin.
    kept: Vec<u8>,
}

impl Rewriter {
    pub(crate) fn new(texts: &[(&str, &str)]) -> Self {
        let is_valid = |(text, other): &(&str, &str)| !text.is_empty() && text.len() == other.len();
        assert!(texts.iter().all(is_valid), "a text and its replacement differ in length");
        let bytes =
            |(text, other): &(&str, &str)| (text.as_bytes().into(), other.as_bytes().into());
        Self { texts: texts.iter().map(bytes).collect(), kept: Vec::new() }
    }

    /// Adds data, and returns what can be passed on. An end with which a text may begin is kept
    /// until there is more.
    pub(crate) fn rewrite<'a>(&mut self, data: &'a [u8]) -> Cow<'a, [u8]> {
        if self.texts.is_empty() {
            return Cow::Borrowed(data);
        }
        let mut all = std::mem::take(&mut self.kept);
        all.extend_from_slice(data);
        for (text, other) in &self.texts {
            let mut from = 0;
            while let Some(place) = all[from..].windows(text.len()).position(|part| part == text) {
                all[from + place..][..text.len()].copy_from_slice(other);
                from += place + text.len();
            }
        }
        let may_begin = |end: &[u8]| self.texts.iter().any(|(text, _)| text.starts_with(end));
        let longest = self.texts.iter().map(|(text, _)| text.len() - 1).max().unwrap_or(0);
        let first = all.len().saturating_sub(longest);
        let end = (first..all.len()).find(|&end| may_begin(&all[end..])).unwrap_or(all.len());
        self.kept = all.split_off(end);
        Cow::Owned(all)
    }
}

#[cfg(test)]
mod tests {
    use super::Rewriter;

    #[test]
    fn texts_are_replaced_wherever_the_data_is_divided() {
        let texts = [("abab", "ABAB"), ("bc", "BC")];
        let (data, expected) = (b"xababcaba-ab", b"xABABcaba-ab");
        for first in 0..data.len() {
            for second in first..data.len() {
                let mut rewriter = Rewriter::new(&texts);
                let parts = [&data[..first], &data[first..second], &data[second..], b"."];
                let written: Vec<u8> =
                    parts.iter().flat_map(|part| rewriter.rewrite(part).into_owned()).collect();
                assert_eq!(written[..expected.len()], expected[..], "at {first} and {second}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "differ in length")]
    fn a_replacement_of_another_length_is_refused() {
        drop(Rewriter::new(&[("a", "ab")]));
    }
}
