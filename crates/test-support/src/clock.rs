//! A wall clock of a server that a test can set.
//!
//! The system's clock does not change: a small preloaded library shifts the wall clock of the
//! server by a number in a file. It uses system calls only, because Redis cannot start with a
//! library that allocates memory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset_ms;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("SYNCGUARD_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, 8, PROT_READ, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) offset_ms = memory;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && clock == CLOCK_REALTIME && offset_ms) {
        long long ms = *offset_ms + time->tv_sec * 1000LL;
        time->tv_sec = ms / 1000;
        time->tv_nsec += ms % 1000 * 1000000;
        if (time->tv_nsec >= 1000000000) { time->tv_sec += 1; time->tv_nsec -= 1000000000; }
    }
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The clock of a server. It is right until it is set.
#[derive(Debug)]
pub(crate) struct ServerClock {
    library: PathBuf,
    offset: PathBuf,
}

impl ServerClock {
    /// Creates a clock whose files are in a directory.
    pub(crate) fn new(directory: &Path) -> Self {
        let source = directory.join("clock.c");
        let (library, offset) = (directory.join("clock.so"), directory.join("clock-offset"));
        std::fs::write(&source, LIBRARY).expect("written");
        std::fs::write(&offset, 0_i64.to_ne_bytes()).expect("written");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source);
        assert!(compiler.status().expect("a C compiler").success(), "the library is compiled");
        Self { library, offset }
    }

    /// Returns the environment of a server with this clock.
    pub(crate) fn environment(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("SYNCGUARD_CLOCK_OFFSET", &self.offset)]
    }

    /// Sets how many milliseconds the clock is ahead of the true time; behind, if negative.
    pub(crate) fn set(&self, ahead_ms: i64) {
        // The server has the file in its memory, so it must not become shorter meanwhile.
        let file = File::options().write(true).open(&self.offset).expect("it exists");
        file.write_all_at(&ahead_ms.to_ne_bytes(), 0).expect("written");
    }
}

#[cfg(test)]
mod tests {
    use crate::{PostgresOptions, PostgresServer, RedisOptions, RedisServer};

    /// Checks a clock that is set in milliseconds and read in seconds.
    fn moves_and_comes_back(set: impl Fn(i64), now: impl Fn() -> i64) {
        let before = now();
        set(3_600_000);
        assert!((3_590..3_610).contains(&(now() - before)));
        set(-3_600_000);
        assert!((-3_610..-3_590).contains(&(now() - before)));
        set(0);
        assert!((0..20).contains(&(now() - before)));
    }

    #[test]
    fn the_clock_of_redis_moves_and_comes_back() {
        let options = RedisOptions::default().with_clock();
        let Some(server) = RedisServer::start(&options) else { return };
        let now = || {
            let time = server.cli(&["TIME"]);
            time.lines().next().and_then(|seconds| seconds.parse().ok()).expect("seconds")
        };
        moves_and_comes_back(|ahead_ms| server.set_clock(ahead_ms), now);
    }

    #[test]
    fn the_clock_of_postgres_moves_and_comes_back() {
        let options = PostgresOptions::default().with_clock();
        let Some(server) = PostgresServer::start(&options) else { return };
        let sql = "SELECT floor(extract(epoch FROM clock_timestamp()))::bigint";
        let now = || server.sql(sql).parse().expect("seconds");
        moves_and_comes_back(|ahead_ms| server.set_clock(ahead_ms), now);
    }
}
