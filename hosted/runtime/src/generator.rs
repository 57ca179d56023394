//! The random numbers of the guest's kernel.
//!
//! Clones would all begin with the same state of the kernel's generator, and make the same keys. A bare
//! machine's firmware tells the kernel of a clone (the virtual machine generation ID), and the kernel takes
//! new randomness (`add_vmfork_randomness`). Here the monitor does the same by the kernel's own variable
//! `base_crng` (`drivers/char/random.c`, Linux 5.18 and later): it puts a new key there, and raises the
//! generation, by which each processor's generator sees that its own key is old.

use crate::{
    error::{Error, Result},
    kernel::Kernel,
    memory::Memory,
};

const NAME: &str = "base_crng";
/// Offsets of the fields: the key, the time at which it was made, and the generation.
const KEY: usize = 32;
const GENERATION: u64 = 40;
/// Sizes of the variable, without and with a lock.
const SIZES: std::ops::RangeInclusive<u64> = 48..=64;
/// The generation before the kernel has its first key.
const NONE: u64 = u64::MAX;

/// The place of the generator's state in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Generator(u64);

impl Generator {
    /// Finds the generator of a kernel. Returns nothing if the kernel has another one.
    #[must_use]
    pub fn find(kernel: &Kernel) -> Option<Self> {
        let (address, size) = kernel.find(NAME).ok()?;
        SIZES.contains(&size).then(|| kernel.physical(address).map(Self)).flatten()
    }

    /// Gives the generator a new key.
    ///
    /// # Errors
    /// If the host has no random numbers.
    pub fn reseed(self, memory: &Memory) -> Result<()> {
        let key: [u8; KEY] = random()?;
        let outside = || Error::new("the kernel's generator is not in its memory: this is a bug");
        let generation = memory.read_long(self.0 + GENERATION).ok_or_else(outside)?;
        let next = if generation.wrapping_add(1) == NONE { 0 } else { generation.wrapping_add(1) };
        memory.write(self.0, &key).ok_or_else(outside)?;
        memory.write_long(self.0 + GENERATION, next).ok_or_else(outside)
    }
}

/// Returns random bytes of the host.
///
/// # Errors
/// If the host has none.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: There is room for so many bytes.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if count == N as isize { Ok(bytes) } else { Err(Error::system("get random numbers")) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::with_memory;

    #[test]
    fn each_key_is_new_and_so_is_the_generation() {
        with_memory(|memory| {
            const AT: u64 = 0x3000;
            let state = || {
                let mut key = [0; KEY];
                memory.read(AT, &mut key).unwrap();
                (key, memory.read_long(AT + GENERATION).unwrap())
            };
            memory.clear(AT, 64).unwrap();
            memory.write_long(AT + 32, 7).unwrap();
            Generator(AT).reseed(memory).unwrap();
            let first = state();
            Generator(AT).reseed(memory).unwrap();
            let second = state();
            assert!(first.0 != [0; KEY] && first.0 != second.0);
            assert_eq!((first.1, second.1, memory.read_long(AT + 32)), (1, 2, Some(7)));
            memory.write_long(AT + GENERATION, NONE - 1).unwrap();
            Generator(AT).reseed(memory).unwrap();
            assert_eq!(state().1, 0, "the kernel takes this number for a generator without a key");
        });
    }
}
