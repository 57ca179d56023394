//! A source of randomness (virtio 1.2, 5.4): the host's.

use crate::{
    memory::{self, View},
    virtio::{Device, Ring},
};

/// At most so much for a buffer: the driver asks again.
const MOST: u64 = 4096;

/// The source of randomness.
#[derive(Debug)]
pub struct Rng;

impl Device for Rng {
    fn number(&self) -> u32 {
        4
    }

    fn has_events(&self) -> bool {
        false
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, _: u64) -> bool {
        let [ring] = rings else { return false };
        while let Some(chain) = ring.pop() {
            let head = chain.head_index();
            let mut written = 0;
            for part in chain.writable() {
                let length = u64::from(part.len()).min(MOST - written);
                let Some(done) = fill(memory, part.addr().0, length) else { break };
                written += done;
                if done < length {
                    break;
                }
            }
            ring.used(head, written as u32);
        }
        false
    }
}

/// Fills a range. Says how much of it, or `None` if the guest has not such memory.
fn fill(view: &View, at: u64, length: u64) -> Option<u64> {
    let start = memory::buffer(view, at, length)?;
    // SAFETY: The guest's memory has the range, and stays mapped. The host's kernel writes there by
    // the address, as other processors of the guest may. Rust has no reference to the range.
    let done = unsafe { libc::getrandom(start.cast(), length as usize, 0) };
    u64::try_from(done).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, BUFFERS, with_driver};
    use proptest::prelude::*;

    #[test]
    fn a_buffer_is_filled_and_the_next_one_otherwise() {
        with_driver(Rng, |driver| {
            driver.begin(1 << 32, 1);
            driver.offer(0, 0, &[(BUFFERS, 64, true)]);
            driver.offer(0, 1, &[(BUFFERS + 64, 32, true), (BUFFERS + 96, 32, true)]);
            // Not for the device to write to; not there; more than is given at once.
            driver.offer(0, 3, &[(BUFFERS, 64, false)]);
            driver.offer(0, 4, &[(u64::MAX - 8, 64, true)]);
            driver.offer(0, 5, &[(BUFFERS + 0x1000, 8000, true)]);
            assert!(driver.notify(0));
            assert_eq!(driver.used(0), [(0, 64), (1, 64), (3, 0), (4, 0), (5, 4096)]);
            let (first, second) = (driver.bytes(BUFFERS, 64), driver.bytes(BUFFERS + 64, 64));
            assert_ne!(first, second);
            assert!(first.iter().any(|byte| *byte != 0) && second.iter().any(|byte| *byte != 0));
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(Rng, |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(Rng, |driver| testing::give_chains(driver, 1, &chains));
        }
    }
}
