//! Pseudo-random numbers from a seed (xorshift64*). Nothing here needs better ones.

#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Returns the generator of a seed. Streams of neighbouring seeds are unrelated.
    pub fn new(seed: u64) -> Self {
        let mut mixed = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        Self((mixed ^ (mixed >> 31)).max(1))
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns one of several values.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns true once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Fills bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.next().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_decides_and_seeds_differ() {
        let run = |seed| {
            let mut rng = Rng::new(seed);
            [rng.next(), rng.next(), rng.next()]
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }
}
