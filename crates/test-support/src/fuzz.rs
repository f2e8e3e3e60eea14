//! A fuzzer for parsers, which runs as an ordinary test on a stable toolchain.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::Instant;

use crate::figure;

/// Feeds a parser with valid inputs that are changed at random, and looks for panics.
///
/// * The inputs start from a corpus: the given seeds, and the lines of `fuzz/<name>.txt` in the
///   directory of the crate under test, escaped as in Rust. Each runs unchanged first, so a line is
///   a regression test.
/// * `parse` returns a signature of what it did, such as an error message. An input with a new
///   signature joins the corpus of this run, so that changes build on each other.
/// * An input that panics is added to the file. With `SYNCGUARD_FUZZ_KEEP`, the first short inputs
///   with a new signature are added too.
/// * There are 100,000 runs, or as many as `SYNCGUARD_FUZZ_RUNS` says. They are the same every
///   time; `SYNCGUARD_SEED` selects others.
///
/// # Panics
///
/// If `parse` does.
pub fn fuzz<'a>(
    name: &str,
    crate_directory: &str,
    seeds: impl IntoIterator<Item = &'a [u8]>,
    mut parse: impl FnMut(&[u8]) -> String,
) {
    /// Enough inputs to build on, and few enough that all of them are used.
    const CORPUS: usize = 2_000;
    let file = PathBuf::from(crate_directory).join("fuzz").join(format!("{name}.txt"));
    let lines = fs::read_to_string(&file).unwrap_or_default();
    let mut corpus: Vec<Vec<u8>> = seeds.into_iter().map(<[u8]>::to_vec).collect();
    corpus.extend(lines.lines().map(unescape));
    assert!(!corpus.is_empty(), "{name} has no corpus");
    let add = |input: &[u8]| {
        fs::create_dir_all(file.parent().expect("a directory")).expect("a writable directory");
        let opened = File::options().append(true).create(true).open(&file);
        let line = format!("{}\n", input.escape_ascii());
        opened.and_then(|mut file| file.write_all(line.as_bytes())).expect("a writable file");
    };
    let mut signatures = HashSet::new();
    let mut run = |input: &[u8]| match catch_unwind(AssertUnwindSafe(|| parse(input))) {
        Ok(signature) => signatures.insert(signature),
        Err(panic) => {
            add(input);
            eprintln!("the last line of {} panics", file.display());
            resume_unwind(panic)
        }
    };
    for input in corpus.clone() {
        run(&input);
    }
    let number = |variable: &str, default: u64| {
        let value = std::env::var(variable).ok();
        value.map_or(default, |value| value.parse().expect("a number"))
    };
    let runs = number("SYNCGUARD_FUZZ_RUNS", 100_000);
    let mut random = Random(number("SYNCGUARD_SEED", 1).wrapping_mul(0x9E37_79B9) | 1);
    let (known, started) = (corpus.len(), Instant::now());
    for _ in 0..runs {
        let input = random.change(&corpus);
        if run(&input) && corpus.len() < CORPUS {
            corpus.push(input);
        }
    }
    if std::env::var_os("SYNCGUARD_FUZZ_KEEP").is_some() {
        corpus[known..].iter().filter(|input| input.len() < 200).take(20).for_each(|it| add(it));
    }
    figure(&format!("fuzz runs: {name}"), runs);
    println!("{name}: {} signatures, {:.1?}", signatures.len(), started.elapsed());
}

/// Reverses [`u8::escape_ascii`].
fn unescape(line: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), line.as_bytes());
    while let [first, after @ ..] = rest {
        let (byte, left) = match (first, after) {
            (b'\\', [b'x', digits @ ..]) if digits.len() >= 2 => {
                let digits_text = str::from_utf8(&digits[..2]).expect("ASCII");
                (u8::from_str_radix(digits_text, 16).expect("a hexadecimal byte"), &digits[2..])
            }
            (b'\\', [b'n', left @ ..]) => (b'\n', left),
            (b'\\', [b'r', left @ ..]) => (b'\r', left),
            (b'\\', [b't', left @ ..]) => (b'\t', left),
            (b'\\', [escaped, left @ ..]) => (*escaped, left),
            (byte, left) => (*byte, left),
        };
        bytes.push(byte);
        rest = left;
    }
    bytes
}

struct Random(u64);

impl Random {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 24) % bound.max(1) as u64).expect("a small number")
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).expect("a byte")
    }

    /// Returns a part of `bytes`: where it begins and where it ends.
    fn part(&mut self, bytes: &[u8]) -> (usize, usize) {
        let start = self.below(bytes.len() + 1);
        let length = self.below((bytes.len() - start).min(24) + 1);
        (start, start + length)
    }

    /// Returns a changed input.
    fn change(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        /// Text that parsers treat specially.
        const TOKENS: [&str; 36] = [
            "",
            "0",
            "-1",
            "1e309",
            "NaN",
            "null",
            "true",
            "9007199254740992",
            "18446744073709551616",
            "-9223372036854775808",
            "000000000000000",
            "999999999999999",
            "\0",
            "\u{FEFF}",
            "\u{202E}",
            "e\u{301}",
            "ﬃ",
            "%00",
            "%2F",
            "%zz",
            "://",
            "?",
            "&",
            "=",
            "#",
            "@",
            ":",
            ",",
            "/",
            "[::1]",
            "..",
            "\"",
            "\\u0000",
            "\r\n",
            "$-1\r\n",
            "*-1\r\n",
        ];
        let mut input = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(5) {
            let (start, end) = self.part(&input);
            match self.below(9) {
                0 if !input.is_empty() => {
                    let place = self.below(input.len());
                    input[place] ^= 1 << self.below(8);
                }
                1 if !input.is_empty() => {
                    let place = self.below(input.len());
                    input[place] = self.byte();
                }
                2 => drop(input.drain(start..end)),
                3 => input.truncate(start),
                4 => {
                    let copy = input[start..end].to_vec();
                    input.splice(end..end, copy);
                }
                5 => {
                    let bytes: Vec<u8> = (0..=self.below(4)).map(|_| self.byte()).collect();
                    input.splice(start..start, bytes);
                }
                6 => {
                    let other = &corpus[self.below(corpus.len())];
                    let (from, to) = self.part(other);
                    input.splice(start..end, other[from..to].to_vec());
                }
                7 => {
                    let token = TOKENS[self.below(TOKENS.len())];
                    input.splice(start..end, token.bytes());
                }
                // A long run, for limits.
                _ if self.below(40) == 0 => {
                    let (byte, count) = (self.byte(), self.below(3_000));
                    input.splice(start..start, std::iter::repeat_n(byte, count));
                }
                _ => {}
            }
        }
        input.truncate(8_192);
        input
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_survives_a_line_of_the_corpus() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(unescape(&bytes.escape_ascii().to_string()), bytes);
    }

    #[test]
    #[should_panic(expected = "a bug")]
    fn a_rare_panic_is_found() {
        let directory = crate::TempDir::new();
        let path = directory.path().to_str().expect("UTF-8");
        fuzz("rare", path, [b"abc".as_slice()], |input| {
            // Each step has a signature of its own, so that the next one is within reach.
            let found = [0xFF, 0xFE].iter().filter(|byte| input.contains(byte)).count();
            assert!(found < 2 || input.len() < 20, "a bug");
            format!("{found} {}", input.len().min(20))
        });
    }
}
