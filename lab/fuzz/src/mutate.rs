//! A seeded generator of inputs by mutation.
//!
//! It has no coverage to follow, as stable Rust gives none. It keeps inputs whose outcome is new
//! ([`crate::Target::run`]), and mutates those further.

/// Longest input in bytes.
pub const LONGEST: usize = 16 << 10;
/// Largest number of kept inputs.
const POOL: usize = 400;
/// Values at which parsers go wrong.
const VALUES: [u64; 14] =
    [0, 1, 2, 3, 7, 0x7F, 0x80, 0xFF, 0x1000, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, u64::MAX >> 1, u64::MAX];

/// A xorshift generator of random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        (self.number() % (end.max(1) as u64)) as usize
    }
}

/// The inputs that a generator mutates.
#[derive(Clone, Debug)]
pub struct Generator {
    pool: Vec<Vec<u8>>,
    seen: std::collections::HashSet<u64>,
    random: Random,
}

impl Generator {
    #[must_use]
    pub fn new(seeds: Vec<Vec<u8>>, seed: u64) -> Self {
        let pool = if seeds.is_empty() { vec![Vec::new()] } else { seeds };
        Self { pool, seen: std::collections::HashSet::new(), random: Random::new(seed) }
    }

    /// Returns the next input.
    pub fn input(&mut self) -> Vec<u8> {
        let at = self.random.below(self.pool.len());
        let mut input = self.pool[at].clone();
        for _ in 0..=self.random.below(6) {
            self.mutate(&mut input);
        }
        input.truncate(LONGEST);
        input
    }

    /// Keeps an input if its outcome is new.
    pub fn learn(&mut self, input: &[u8], outcome: u64) {
        if !self.seen.insert(outcome) {
            return;
        }
        if self.pool.len() < POOL {
            self.pool.push(input.to_vec());
        } else {
            let at = self.random.below(POOL);
            self.pool[at] = input.to_vec();
        }
    }

    /// Returns the number of different outcomes.
    #[must_use]
    pub fn outcomes(&self) -> usize {
        self.seen.len()
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let random = &mut self.random;
        let at = random.below(input.len());
        match random.below(9) {
            _ if input.is_empty() => input.push(random.number() as u8),
            0 => input[at] ^= 1 << random.below(8),
            1 => input[at] = random.number() as u8,
            2 => input[at] = input[at].wrapping_add(random.below(9) as u8).wrapping_sub(4),
            3 => {
                let value = VALUES[random.below(VALUES.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(input.len() - at);
                input[at..at + width].copy_from_slice(&value[..width]);
            }
            4 => {
                let end = at + random.below((input.len() - at).min(64)) + 1;
                drop(input.drain(at..end.min(input.len())));
            }
            5 => {
                let new: Vec<u8> = (0..=random.below(8)).map(|_| random.number() as u8).collect();
                input.splice(at..at, new);
            }
            6 => {
                let end = (at + random.below(64) + 1).min(input.len());
                let copy = input[at..end].to_vec();
                let to = random.below(input.len());
                input.splice(to..to, copy);
            }
            7 => {
                let other = &self.pool[random.below(self.pool.len())];
                let from = random.below(other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from.min(other.len())..]);
            }
            _ => input.truncate(at),
        }
    }
}
