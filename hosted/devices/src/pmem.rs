//! A disk whose content is a part of the guest's memory (virtio 1.2, 5.19: pmem). The device says where.
//! The guest's kernel reads and writes it there, so the only request is a flush.
//!
//! A flush has nothing to do: what a guest writes to such a disk is gone at the machine's end. A region that
//! several machines have in common is such a device, too.

use crate::{
    memory::{self, View},
    virtio::{Device, Ring},
};

/// The only kind of request.
const FLUSH: u32 = 0;
/// The results of a request.
const DONE: u32 = 0;
const FAILED: u32 = 1;
/// The length of a result, in bytes.
const RESULT: u32 = 4;

/// The device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pmem {
    /// The physical address at which the content begins.
    pub start: u64,
    /// The size of the content, in bytes.
    pub size: u64,
    /// The time at which the image changed last.
    pub changed: [u64; 2],
}

impl Device for Pmem {
    fn number(&self) -> u32 {
        27
    }

    fn configuration(&self) -> Vec<u8> {
        [self.start, self.size].map(u64::to_le_bytes).concat()
    }

    fn has_events(&self) -> bool {
        false
    }

    fn changed(&self) -> [u64; 2] {
        self.changed
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, _: u64) -> bool {
        let [ring] = rings else { return false };
        while let Some(mut chain) = ring.pop() {
            let head = chain.head_index();
            let (mut kind, mut written) = (None, 0);
            // The kind of request comes first, the place of the result after it.
            if let (Some(request), Some(result)) = (chain.next(), chain.next())
                && result.is_write_only()
                && result.len() >= RESULT
            {
                let mut word = [0; 4];
                if request.len() as usize >= word.len() && !request.is_write_only() {
                    kind =
                        memory::read(memory, request.addr().0, &mut word).map(|()| u32::from_le_bytes(word));
                }
                let answer = if kind == Some(FLUSH) { DONE } else { FAILED };
                if memory::write(memory, result.addr().0, &answer.to_le_bytes()).is_some() {
                    written = RESULT;
                }
            }
            ring.used(head, written);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{self, BUFFERS, with_driver};

    const DISK: Pmem = Pmem { start: 0x4000_0000, size: 0x20_0000, changed: [1, 2] };

    #[test]
    fn a_flush_succeeds_and_nothing_else_does() {
        with_driver(DISK, |driver| {
            driver.begin(1 << 32, 1);
            let read = |driver: &testing::Driver<'_>, at| driver.transport.read(at, 4);
            assert_eq!(
                [0x100, 0x104, 0x108, 0x10C].map(|at| read(driver, at)),
                [DISK.start, 0, DISK.size, 0]
            );
            driver.put(BUFFERS, &[FLUSH.to_le_bytes(), 1_u32.to_le_bytes(), [7; 4], [7; 4]].concat());
            for (head, parts) in [
                (0, vec![(BUFFERS, 4, false), (BUFFERS + 8, 4, true)]),
                (2, vec![(BUFFERS + 4, 4, false), (BUFFERS + 12, 4, true)]),
                // No place for the result, one that is too short, a request that is too short.
                (4, vec![(BUFFERS, 4, false)]),
                (5, vec![(BUFFERS, 4, false), (BUFFERS + 16, 3, true)]),
            ] {
                driver.offer(0, head, &parts);
            }
            assert!(driver.notify(0));
            assert_eq!(driver.used(0), [(0, 4), (2, 4), (4, 0), (5, 0)]);
            assert_eq!(driver.bytes(BUFFERS + 8, 4), DONE.to_le_bytes());
            assert_eq!(driver.bytes(BUFFERS + 12, 8), [FAILED.to_le_bytes(), [0; 4]].concat());
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(DISK, |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(DISK, |driver| testing::give_chains(driver, 1, &chains));
        }
    }
}
