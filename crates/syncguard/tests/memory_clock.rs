//! Locks in memory while somebody sets the wall clock.
//!
//! The clock is not really set: a second process of this test runs with a small library in front of
//! the system's own, which moves the wall clock by an hour as long as a file exists.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use syncguard::{
    Acquire, AcquireRequest, Extend, ExtendRequest, Key, LockBackend, MemoryBackend, Release,
    ReleaseRequest, Ttl,
};
use test_support::TempDir;

/// The directory in which the files below move the wall clock of the second process.
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
        snprintf(path, sizeof path, "%s/ahead", directory);
        if (access(path, F_OK) == 0) time->tv_sec += 3600;
        snprintf(path, sizeof path, "%s/behind", directory);
        if (access(path, F_OK) == 0) time->tv_sec -= 3600;
    }
    return result;
}
"#;

/// Runs one test of this file again, in a process whose wall clock can be moved.
fn run_with_a_movable_clock(test: &str) {
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

/// Moves the wall clock of this process, and makes sure that it really moved.
fn move_the_clock(directory: &Path, direction: &str) {
    let before = SystemTime::now();
    fs::write(directory.join(direction), "").expect("written");
    let after = SystemTime::now();
    let moved = after.duration_since(before).unwrap_or_else(|backwards| backwards.duration());
    assert!(moved > HOUR / 2, "the clock of this process did not move");
}

async fn is_held_and_can_be_extended(backend: &MemoryBackend, request: &AcquireRequest) {
    assert!(backend.is_locked(request.key()).await.expect("works"), "the lock is lost");
    let other = AcquireRequest::new(request.key().clone(), Ttl::DEFAULT).expect("randomness");
    let rival = backend.acquire(&other).await.expect("works");
    assert!(matches!(rival, Acquire::Contended { .. }), "two hold the same lock");
    let extend = ExtendRequest::new(request.lock_id(), Ttl::DEFAULT);
    let answer = backend.extend(&extend).await.expect("works");
    assert!(matches!(answer, Extend::Extended(_)), "{answer:?}");
}

#[test]
fn a_wall_clock_that_jumps_ahead_frees_no_lock() {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return run_with_a_movable_clock("a_wall_clock_that_jumps_ahead_frees_no_lock");
    };
    run(async {
        let backend = MemoryBackend::new();
        let request = request("ahead", Ttl::DEFAULT);
        assert!(matches!(backend.acquire(&request).await, Ok(Acquire::Acquired(_))));
        move_the_clock(Path::new(&directory), "ahead");
        is_held_and_can_be_extended(&backend, &request).await;
        let release = ReleaseRequest::new(request.lock_id());
        assert_eq!(backend.release(&release).await.expect("works"), Release::Released);
    });
}

#[test]
fn a_wall_clock_that_is_set_back_keeps_no_lock_alive() {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return run_with_a_movable_clock("a_wall_clock_that_is_set_back_keeps_no_lock_alive");
    };
    run(async {
        let backend = MemoryBackend::new();
        let short = Ttl::new(Duration::from_millis(1)).expect("valid");
        let request = request("behind", short);
        assert!(matches!(backend.acquire(&request).await, Ok(Acquire::Acquired(_))));
        move_the_clock(Path::new(&directory), "behind");
        tokio::time::sleep(Duration::from_millis(1100)).await;
        assert!(
            !backend.is_locked(request.key()).await.expect("works"),
            "the lock outlives its TTL"
        );
    });
}

/// Timestamps still say what time it is.
#[test]
fn times_are_those_of_the_wall_clock() {
    run(async {
        let backend = MemoryBackend::new();
        let request = request("readable", Ttl::DEFAULT);
        let Ok(Acquire::Acquired(lease)) = backend.acquire(&request).await else { panic!() };
        let expires_at = SystemTime::from(lease.expires_at());
        let expected = SystemTime::now() + Ttl::DEFAULT.as_duration();
        let off = expected.duration_since(expires_at).unwrap_or_else(|ahead| ahead.duration());
        assert!(off < Duration::from_mins(1), "off by {off:?}");
    });
}

fn request(key: &str, ttl: Ttl) -> AcquireRequest {
    AcquireRequest::new(Key::new(key).expect("valid"), ttl).expect("randomness")
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(test);
}
