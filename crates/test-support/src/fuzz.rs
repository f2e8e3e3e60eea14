//! A fuzzer for parsers, which runs as an ordinary test on a stable toolchain.

use std::collections::HashSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;

use crate::figure;

/// Feeds a parser with valid inputs that are changed at random, and looks for panics.
///
/// * The inputs start from a corpus: the given seeds, and the files in `fuzz/<name>` of the crate
///   under test. Every file runs unchanged first, so a file is a regression test.
/// * `parse` returns a signature of what it did, such as an error message. An input with a new
///   signature joins the corpus of this run, so that changes build on each other.
/// * An input that panics is written to that directory.
/// * There are 100,000 runs, or as many as `SYNCGUARD_FUZZ_RUNS` says. They are the same every time,
///   unless `SYNCGUARD_SEED` is another number than 1.
///
/// # Panics
///
/// If `parse` does. The message names the file with the input.
pub fn fuzz<'a>(
    name: &str,
    crate_directory: &str,
    seeds: impl IntoIterator<Item = &'a [u8]>,
    mut parse: impl FnMut(&[u8]) -> String,
) {
    /// Enough inputs to build on, and few enough that all of them are used.
    const CORPUS: usize = 2_000;
    let directory = PathBuf::from(crate_directory).join("fuzz").join(name);
    let mut corpus: Vec<Vec<u8>> = seeds.into_iter().map(<[u8]>::to_vec).collect();
    let mut files: Vec<_> = fs::read_dir(&directory)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    files.sort();
    corpus.extend(files.iter().map(|path| fs::read(path).expect("a readable corpus")));
    assert!(!corpus.is_empty(), "{name} has no corpus");
    let mut signatures = HashSet::new();
    let mut run = |input: &[u8]| {
        let outcome = catch_unwind(AssertUnwindSafe(|| parse(input)));
        match outcome {
            Ok(signature) => signatures.insert(signature),
            Err(panic) => {
                let number = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
                let path = directory.join(format!("crash-{number:016x}"));
                fs::create_dir_all(&directory).expect("a writable directory");
                fs::write(&path, input).expect("a writable directory");
                eprintln!("{name}: this input panics: {}", path.display());
                resume_unwind(panic)
            }
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
    let started = std::time::Instant::now();
    for _ in 0..runs {
        let input = random.change(&corpus);
        if run(&input) && corpus.len() < CORPUS {
            corpus.push(input);
        }
    }
    figure(&format!("fuzz runs: {name}"), runs);
    println!("{name}: {} signatures, {:.1?}", signatures.len(), started.elapsed());
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
