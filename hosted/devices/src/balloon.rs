//! A device to which the guest's kernel reports memory that it does not use (virtio 1.2, 5.5.6.7: free page
//! reporting). The host gets the memory back. A page that was given back is zero when the guest uses it
//! again.
//!
//! The device is a balloon by its number, but asks the guest for no memory.

use crate::{
    memory::{self, View},
    virtio::{Device, Ring},
};

/// The feature: the driver reports memory that is not used.
const REPORTING: u64 = 1 << 5;
/// Queues of a balloon: to take memory from the guest, and to give it back.
const BALLOON_QUEUES: usize = 2;

/// The device.
#[derive(Debug)]
pub struct Balloon;

impl Device for Balloon {
    fn number(&self) -> u32 {
        5
    }

    fn queues(&self) -> usize {
        BALLOON_QUEUES + 1
    }

    fn features(&self) -> u64 {
        REPORTING
    }

    fn has_events(&self) -> bool {
        false
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, accepted: u64) -> bool {
        let Some(reports) = rings.get_mut(BALLOON_QUEUES).filter(|_| accepted & REPORTING != 0) else {
            return false;
        };
        while let Some(chain) = reports.pop() {
            let head = chain.head_index();
            for part in chain.writable() {
                memory::give_back(memory, part.addr().0, part.len().into());
            }
            // The driver lends the memory out again only now.
            reports.used(head, 0);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{self, BUFFERS, with_driver};

    #[test]
    fn reported_memory_is_empty_and_the_rest_stays() {
        with_driver(Balloon, |driver| {
            driver.begin(1 << 32 | REPORTING, 3);
            let full = [7; 0x3000];
            driver.put(BUFFERS, &full);
            // One page, a part of one, what the device may not write to, and what is not there.
            driver.offer(2, 0, &[(BUFFERS + 0x1000, 0x1000, true)]);
            driver.offer(2, 1, &[(BUFFERS + 0x2000, 0x800, true)]);
            driver.offer(2, 2, &[(BUFFERS, 0x1000, false)]);
            driver.offer(2, 3, &[(u64::MAX - 0xFFF, 0x1000, true)]);
            assert!(driver.notify(2));
            assert_eq!(driver.used(2), [(0, 0), (1, 0), (2, 0), (3, 0)]);
            assert_eq!(driver.bytes(BUFFERS, 0x1000), full[..0x1000]);
            assert_eq!(driver.bytes(BUFFERS + 0x1000, 0x1000), [0; 0x1000]);
            assert_eq!(driver.bytes(BUFFERS + 0x2000, 0x1000), full[..0x1000]);
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(Balloon, |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(Balloon, |driver| testing::give_chains(driver, 3, &chains));
        }
    }
}
