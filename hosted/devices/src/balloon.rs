//! The balloon: a device by which the guest's kernel gives memory to the host (virtio 1.2, 5.5).
//!
//! Memory comes in two ways. The kernel *reports* memory that it does not use (5.5.6.7: free page reporting),
//! and may use it again whenever it likes. And the device *asks* for memory: the kernel takes as much from
//! its own pool as the device wants, and does not use it until the device wants less. Either way the host
//! gets the pages back, and they are zero when the guest uses them again.
//!
//! A kernel that has no memory left takes some back from the balloon by itself (`DEFLATE_ON_OOM`), so a
//! balloon ends no program.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{
    error::Result,
    memory::{self, View},
    state::{Reader, Writer},
    virtio::{Device, Ring},
};

/// The feature: the driver takes memory back when its programs have none.
const DEFLATES_FOR_PROGRAMS: u64 = 1 << 2;
/// The feature: the driver reports memory that is not used.
const REPORTING: u64 = 1 << 5;
/// The queues: memory for the host, memory that the guest takes back, and reports.
const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const REPORTS: usize = 2;
/// The size of a page of the balloon, whatever the guest's pages are.
const PAGE: u64 = 4096;
/// The size of a page's number, and the numbers that are read from one buffer. Linux puts 256 into one.
const NUMBER: u64 = 4;
const MOST_AT_ONCE: usize = 1024;
/// The offset of the driver's own number in the configuration.
const ACTUAL: u64 = 4;

/// The size of a balloon, in pages. Another process may read and write it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Size {
    /// The pages that the host wants to have.
    pub wanted: AtomicU32,
    /// The pages that the balloon has, as the driver says.
    pub actual: AtomicU32,
}

/// The device.
#[derive(Debug)]
pub struct Balloon {
    size: &'static Size,
    /// The size that the driver was told.
    told: u32,
}

impl Balloon {
    /// Makes a device whose size others may change.
    #[must_use]
    pub fn new(size: &'static Size) -> Self {
        Self { size, told: size.wanted.load(Ordering::Relaxed) }
    }

    /// Makes a device that asks for no memory.
    #[must_use]
    pub fn alone() -> Self {
        Self::new(Box::leak(Box::default()))
    }
}

impl Device for Balloon {
    fn number(&self) -> u32 {
        5
    }

    fn queues(&self) -> usize {
        REPORTS + 1
    }

    fn features(&self) -> u64 {
        DEFLATES_FOR_PROGRAMS | REPORTING
    }

    fn configuration(&self) -> Vec<u8> {
        [self.told, self.size.actual.load(Ordering::Relaxed)].map(u32::to_le_bytes).concat()
    }

    fn configure(&mut self, at: u64, value: u32) {
        if at == ACTUAL {
            self.size.actual.store(value, Ordering::Relaxed);
        }
    }

    /// The size is a state: it differs from one machine to another.
    fn identity(&self) -> Vec<u8> {
        Vec::new()
    }

    fn save(&self, to: &mut Writer) {
        to.numbers([self.told, self.size.actual.load(Ordering::Relaxed)]);
    }

    fn load(&mut self, from: &mut Reader<'_>) -> Result<()> {
        self.told = from.number()?;
        self.size.wanted.store(self.told, Ordering::Relaxed);
        self.size.actual.store(from.number()?, Ordering::Relaxed);
        Ok(())
    }

    fn has_events(&self) -> bool {
        self.told != self.size.wanted.load(Ordering::Relaxed)
    }

    fn work(&mut self, rings: &mut [Ring<'_>], memory: &View, accepted: u64) -> bool {
        if let Some(pages) = rings.get_mut(INFLATE) {
            take(pages, memory);
        }
        if let Some(pages) = rings.get_mut(DEFLATE) {
            // The guest has them already: a page comes when it is used.
            while let Some(chain) = pages.pop() {
                pages.used(chain.head_index(), 0);
            }
        }
        if let Some(reports) = rings.get_mut(REPORTS).filter(|_| accepted & REPORTING != 0) {
            while let Some(chain) = reports.pop() {
                let head = chain.head_index();
                for part in chain.writable() {
                    memory::give_back(memory, part.addr().0, part.len().into());
                }
                // The driver lends the memory out again only now.
                reports.used(head, 0);
            }
        }
        let wanted = self.size.wanted.load(Ordering::Relaxed);
        std::mem::replace(&mut self.told, wanted) != wanted
    }
}

/// Gives the host the pages whose numbers the driver has put into a queue.
fn take(queue: &mut Ring<'_>, memory: &View) {
    while let Some(chain) = queue.pop() {
        let head = chain.head_index();
        let numbers = chain.readable().flat_map(|part| {
            let (at, count) = (part.addr().0, u64::from(part.len()) / NUMBER);
            (0..count).map(move |index| at.checked_add(index * NUMBER))
        });
        for at in numbers.take(MOST_AT_ONCE) {
            let mut number = [0; NUMBER as usize];
            if at.and_then(|at| memory::read(memory, at, &mut number)).is_some() {
                memory::give_back(memory, u64::from(u32::from_le_bytes(number)) * PAGE, PAGE);
            }
        }
        queue.used(head, 0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{self, BUFFERS, with_driver};

    #[test]
    fn reported_memory_is_empty_and_the_rest_stays() {
        with_driver(Balloon::alone(), |driver| {
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

    #[test]
    fn the_device_gets_as_much_memory_as_it_asks_for() {
        static SIZE: Size = Size { wanted: AtomicU32::new(0), actual: AtomicU32::new(0) };
        with_driver(Balloon::new(&SIZE), |driver| {
            driver.begin(1 << 32 | DEFLATES_FOR_PROGRAMS | REPORTING, 3);
            assert!(!driver.poll(), "there is nothing to tell");
            SIZE.wanted.store(2, Ordering::Relaxed);
            assert!(driver.poll(), "the driver is told");
            assert_eq!((driver.transport.read(0x100, 4), driver.transport.read(0x60, 4)), (2, 2));
            assert!(!driver.poll(), "once");
            driver.put(BUFFERS, &[7; 0x4000]);
            // Two pages of the guest's, and one that it does not have.
            let first = (BUFFERS >> 12) as u32;
            driver.put(0x8000, &[first + 1, u32::MAX, first + 3].map(u32::to_le_bytes).concat());
            driver.offer(INFLATE, 0, &[(0x8000, 12, false)]);
            assert!(driver.notify(INFLATE));
            assert_eq!(driver.used(INFLATE), [(0, 0)]);
            for (page, byte) in [7, 0, 7, 0].into_iter().enumerate() {
                let at = BUFFERS + page as u64 * PAGE;
                assert_eq!(driver.bytes(at, PAGE as usize), [byte; PAGE as usize], "{page}");
            }
            driver.write(0x104, 2);
            assert_eq!((driver.transport.read(0x104, 4), SIZE.actual.load(Ordering::Relaxed)), (2, 2));
            driver.offer(DEFLATE, 0, &[(0x8000, 12, false)]);
            assert!(driver.notify(DEFLATE));
            assert_eq!(driver.used(DEFLATE), [(0, 0)]);
        });
    }

    #[test]
    fn a_saved_balloon_is_as_large_as_before() {
        let mut to = Writer::default();
        let balloon = Balloon { told: 5, ..Balloon::alone() };
        balloon.size.actual.store(3, Ordering::Relaxed);
        balloon.save(&mut to);
        let bytes = to.finish();
        let mut other = Balloon::alone();
        other.load(&mut Reader::new(&bytes)).unwrap();
        assert_eq!((other.configuration(), other.has_events()), (balloon.configuration(), false));
        assert!(other.load(&mut Reader::new(&bytes[1..])).is_err());
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(all in testing::anything()) {
            with_driver(Balloon::alone(), |driver| testing::torture(driver, all));
        }

        #[test]
        fn no_chain_makes_it_panic(chains in testing::chains()) {
            with_driver(Balloon::alone(), |driver| testing::give_chains(driver, 3, &chains));
        }
    }
}
