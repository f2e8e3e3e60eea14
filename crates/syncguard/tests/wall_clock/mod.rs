//! A wall clock that a test can set, in its own process.
//!
//! The system's clock does not change: a small preloaded library shifts the wall clock of the
//! process by an hour while a file exists. It does not shift the clock of processes that this
//! process starts.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

use test_support::TempDir;

/// The environment variable with the directory of the files that move the clock.
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

/// Runs a test in a process whose wall clock can be moved: in this process if it was started for
/// that, otherwise in a second one that runs the same test.
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

/// The wall clock of this process. Servers that it starts keep the true time.
pub(crate) struct MovableClock(PathBuf);

impl MovableClock {
    /// Sets the clock an hour ahead of the true time.
    pub(crate) fn set_ahead(&self) {
        self.set("ahead");
    }

    /// Sets the clock an hour behind the true time.
    pub(crate) fn set_back(&self) {
        self.set("behind");
    }

    /// Sets the clock to the true time.
    pub(crate) fn set_true(&self) {
        for direction in ["ahead", "behind"] {
            // The file may not exist.
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
