//! A wall clock that a test can set, in a process of its own.
//!
//! The clock is not really set: the process runs with a small library in front of the system's own,
//! which moves the wall clock by an hour as long as a file exists. Only that process is moved, not
//! those that it starts.

#![allow(dead_code, reason = "every test file uses a part of it")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use test_support::TempDir;

/// Names the directory in which files move the wall clock of the second process.
const DIRECTORY: &str = "SYNCGUARD_TEST_CLOCK";
const HOUR: Duration = Duration::from_hours(1);

const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    const char *directory = getenv("SYNCGUARD_TEST_CLOCK");
    if (clock == CLOCK_REALTIME && directory) {
        char path[4096];
        snprintf(path, sizeof path, "%s/ahead-%d", directory, getpid());
        if (access(path, F_OK) == 0) time->tv_sec += 3600;
        snprintf(path, sizeof path, "%s/behind-%d", directory, getpid());
        if (access(path, F_OK) == 0) time->tv_sec -= 3600;
    }
    return result;
}
"#;

/// Runs a test in a process whose wall clock can be moved: in this process if it is that one, or
/// else in a second one that is started with the same test.
pub(crate) fn with_a_movable_clock(test: &str, body: impl FnOnce(MovableClock)) {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        return body(MovableClock(directory.into()));
    }
    let directory = TempDir::new();
    let source = directory.path().join("clock.c");
    let library = directory.path().join("clock.so");
    fs::write(&source, LIBRARY).expect("written");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-ldl");
    assert!(compiler.status().expect("a C compiler").success(), "the library is compiled");
    let again = Command::new(std::env::current_exe().expect("known"))
        .args(["--exact", test, "--nocapture"])
        .env("LD_PRELOAD", &library)
        .env(DIRECTORY, directory.path())
        .status()
        .expect("it starts");
    assert!(again.success(), "{test} failed while the wall clock moved");
}

/// The wall clock of this process. Servers that it starts keep their own.
pub(crate) struct MovableClock(PathBuf);

impl MovableClock {
    /// Sets it an hour ahead of the truth.
    pub(crate) fn set_ahead(&self) {
        self.set("ahead");
    }

    /// Sets it an hour back.
    pub(crate) fn set_back(&self) {
        self.set("behind");
    }

    /// Sets it right again.
    pub(crate) fn set_true(&self) {
        for direction in ["ahead", "behind"] {
            // It is gone already, or never was.
            drop(fs::remove_file(self.0.join(format!("{direction}-{}", std::process::id()))));
        }
    }

    fn set(&self, direction: &str) {
        let before = SystemTime::now();
        let file = format!("{direction}-{}", std::process::id());
        fs::write(self.0.join(file), "").expect("written");
        let after = SystemTime::now();
        let moved = after.duration_since(before).unwrap_or_else(|backwards| backwards.duration());
        assert!(moved > HOUR / 2, "the clock of this process did not move");
    }
}
