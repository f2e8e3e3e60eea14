//! A small random generator: the same seed draws the same plan everywhere.

use std::ops::Range;
use std::time::Duration;

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Creates a generator that depends on the seed and on a number, such as that of a client.
    #[must_use]
    pub fn of(seed: u64, number: u64) -> Self {
        let mut random = Self(seed ^ number.wrapping_mul(0xA24B_AED4_963E_E407));
        random.draw();
        random
    }

    /// Draws a number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound.max(1)
    }

    /// Draws a number from a range.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// Draws a duration in milliseconds from a range.
    pub fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// Is true in this many of a hundred draws.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Draws one of several values.
    ///
    /// # Panics
    ///
    /// Panics if there are none.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        let index = usize::try_from(self.below(values.len() as u64)).unwrap_or(0);
        values[index]
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn a_seed_draws_the_same_numbers_and_another_seed_others() {
        let draw = |seed| {
            let mut random = Random::of(seed, 3);
            [(); 8].map(|()| random.below(1_000_000))
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn draws_stay_in_their_range() {
        let mut random = Random::new(7);
        assert!((0..1000).all(|_| (5..9).contains(&random.within(5..9))));
        assert!((0..100).all(|_| random.chance(100)));
    }
}
