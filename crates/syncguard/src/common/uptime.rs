//! A clock that never jumps. It counts time since a fixed moment, including suspension where the
//! operating system supports that.

use std::time::Duration;

/// Returns the time since a fixed moment. It never goes backwards, and setting the wall clock does
/// not move it.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn uptime() -> Duration {
    since_boot(rustix::time::ClockId::Boottime)
}

/// On Apple platforms this clock includes sleep, unlike the one behind `std::time::Instant`.
#[cfg(target_vendor = "apple")]
pub(crate) fn uptime() -> Duration {
    since_boot(rustix::time::ClockId::Monotonic)
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn since_boot(clock: rustix::time::ClockId) -> Duration {
    let now = rustix::time::clock_gettime(clock);
    // The kernel counts both from boot, so neither is negative.
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// On other platforms this uses the clock of the standard library; on Windows it includes sleep.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
pub(crate) fn uptime() -> Duration {
    use std::sync::LazyLock;
    use std::time::Instant;

    static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    ORIGIN.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uptime_advances_as_fast_as_the_standard_clock() {
        let (before, started) = (uptime(), std::time::Instant::now());
        std::thread::sleep(Duration::from_millis(5));
        let passed = uptime().checked_sub(before).expect("it never goes backwards");
        assert!(passed >= Duration::from_millis(5), "{passed:?}");
        // A suspension in between makes it larger, so no upper bound is exact.
        assert!(passed <= started.elapsed() + Duration::from_mins(1), "{passed:?}");
    }
}
