//! A driver for the tests of devices: rings at fixed places of a small memory.

use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::{FileOffset, GuestAddress};

use crate::{
    memory::{self, View},
    signals::Waker,
    virtio::{Device, Transport},
};

const SIZE: u64 = 1 << 20;
/// Entries of each queue.
const ENTRIES: u16 = 8;
/// Each queue has its descriptors here, and its rings one and two pages further on.
const RINGS: u64 = 0x1000;
const STEP: u64 = 0x3000;
pub const BUFFERS: u64 = 0x1_0000;

/// A part of a buffer: where, how long, and whether the device may write to it.
pub type Part = (u64, u32, bool);

pub struct Driver<'a> {
    pub transport: Transport,
    memory: &'a View,
    next: [u16; 4],
    seen: [u16; 4],
}

/// Returns a waker that does nothing: tests poll.
pub fn waker() -> Waker {
    Arc::new(|| {})
}

/// Gives a test a memory of two regions, the border of which lies among the buffers.
pub fn with_memory<T>(test: impl FnOnce(&View) -> T) -> T {
    const BORDER: u64 = BUFFERS + 0x8000;
    let ranges = [(GuestAddress(0), BORDER as usize), (GuestAddress(BORDER), (SIZE - BORDER) as usize)];
    if cfg!(miri) {
        return test(&View::from_ranges(&ranges).unwrap());
    }
    // As a monitor has it: a file that is mapped.
    let file = tempfile::tempfile().unwrap();
    file.set_len(SIZE).unwrap();
    let file = Arc::new(file);
    let of_file =
        |(at, size): (GuestAddress, usize)| (at, size, Some(FileOffset::from_arc(Arc::clone(&file), at.0)));
    test(&View::from_ranges_with_files(ranges.map(of_file)).unwrap())
}

pub fn with_driver<T>(device: impl Device + 'static, test: impl FnOnce(&mut Driver<'_>) -> T) -> T {
    with_memory(|memory| test(&mut Driver::new(Box::new(device), memory)))
}

impl<'a> Driver<'a> {
    fn new(device: Box<dyn Device>, memory: &'a View) -> Self {
        let transport = Transport::new(device).unwrap();
        Self { transport, memory, next: [0; 4], seen: [0; 4] }
    }

    pub fn write(&mut self, register: u64, value: u64) -> bool {
        self.transport.write(register, value, self.memory)
    }

    /// Accepts features and makes some queues.
    pub fn begin(&mut self, features: u64, queues: u64) {
        self.write(0x70, 0);
        self.begin_again(features, queues);
    }

    /// Does the same without a reset: the device has a state already.
    pub fn begin_again(&mut self, features: u64, queues: u64) {
        for half in 0..2 {
            self.write(0x24, half);
            self.write(0x20, features >> (32 * half) & 0xFFFF_FFFF);
        }
        for queue in 0..queues {
            let rings = RINGS + queue * STEP;
            for page in 1..3 {
                self.put(rings + page * 0x1000, &[0; 0x100]).unwrap();
            }
            let registers = [
                (0x30, queue),
                (0x38, ENTRIES.into()),
                (0x80, rings),
                (0x90, rings + 0x1000),
                (0xA0, rings + 0x2000),
            ];
            for (register, value) in registers.into_iter().chain([(0x44, 1)]) {
                self.write(register, value);
            }
        }
        (self.next, self.seen) = ([0; 4], [0; 4]);
    }

    /// Puts a buffer into a queue, its parts in descriptors from a number on, and does not say so yet.
    pub fn offer(&mut self, queue: usize, head: u16, parts: &[Part]) {
        let rings = RINGS + queue as u64 * STEP;
        for (index, (address, length, writable)) in (head..).zip(parts) {
            let is_last = usize::from(index - head) + 1 == parts.len();
            let flags = u16::from(!is_last) | if *writable { 2 } else { 0 };
            let mut bytes = u64::to_le_bytes(*address).to_vec();
            bytes.extend(u32::to_le_bytes(*length));
            bytes.extend(u16::to_le_bytes(flags));
            bytes.extend(u16::to_le_bytes(index + 1));
            self.put(rings + u64::from(index) * 16, &bytes).unwrap();
        }
        let slot = u64::from(self.next[queue] % ENTRIES);
        self.put(rings + 0x1004 + slot * 2, &head.to_le_bytes()).unwrap();
        self.next[queue] += 1;
        self.put(rings + 0x1002, &self.next[queue].to_le_bytes()).unwrap();
    }

    /// Says that there is something in a queue; says whether that is answered by an interrupt.
    pub fn notify(&mut self, queue: usize) -> bool {
        self.write(0x50, queue as u64)
    }

    /// Lets the device take events from outside.
    pub fn poll(&mut self) -> bool {
        self.transport.work(self.memory)
    }

    /// Returns the buffers that the device has given back since the last call: their first
    /// descriptors and the bytes written.
    pub fn used(&mut self, queue: usize) -> Vec<(u32, u32)> {
        let rings = RINGS + queue as u64 * STEP;
        let word = |at: u64| {
            let mut bytes = [0; 4];
            memory::read(self.memory, at, &mut bytes).unwrap();
            u32::from_le_bytes(bytes)
        };
        let end = (word(rings + 0x2000) >> 16) as u16;
        let slots = (self.seen[queue]..end).map(|slot| rings + 0x2004 + u64::from(slot % ENTRIES) * 8);
        let used = slots.map(|slot| (word(slot), word(slot + 4))).collect();
        self.seen[queue] = end;
        used
    }

    /// Writes to the guest's memory.
    pub fn put(&self, at: u64, bytes: &[u8]) -> Option<()> {
        memory::write(self.memory, at, bytes)
    }

    pub fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        memory::read(self.memory, at, &mut bytes).unwrap();
        bytes
    }
}

/// Addresses or registers, and what is written there.
type Writes = Vec<(u64, u64)>;

/// Makes the actions of a broken or malicious driver: words anywhere in memory, then registers,
/// each followed by notices.
pub fn anything() -> impl Strategy<Value = (Writes, Writes)> {
    let words = proptest::collection::vec((0_u64..0x4000, any::<u64>()), 0..40);
    let writes = proptest::collection::vec((0_u64..0x110, 0_u64..0x4000), 1..60);
    (words, writes)
}

/// Does that to a device.
pub fn torture(driver: &mut Driver<'_>, (words, writes): (Writes, Writes)) {
    for (at, value) in words {
        driver.put(at, &value.to_le_bytes()).unwrap();
    }
    for (register, value) in writes {
        driver.write(register & !3, value);
        driver.notify(0);
        driver.poll();
        let _ = driver.transport.read(register, 4);
    }
}

/// Chains of a queue that is in order: descriptors of any address, length, flags and successor.
pub fn chains() -> impl Strategy<Value = Vec<(u64, u32, u16, u16)>> {
    let address = prop_oneof![0_u64..SIZE, any::<u64>(), Just(SIZE - 10)];
    let length = prop_oneof![0_u32..70_000, any::<u32>()];
    proptest::collection::vec((address, length, 0_u16..4, 0_u16..ENTRIES + 1), usize::from(ENTRIES))
}

/// Gives a device all of them, in both queues if it has two.
pub fn give_chains(driver: &mut Driver<'_>, queues: u64, chains: &[(u64, u32, u16, u16)]) {
    driver.begin(1 << 32 | 1 << 15, queues);
    for queue in 0..queues {
        let rings = RINGS + queue * STEP;
        for (index, (address, length, flags, next)) in chains.iter().enumerate() {
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            driver.put(rings + index as u64 * 16, &bytes).unwrap();
        }
        let heads: Vec<u8> = (0..ENTRIES).flat_map(u16::to_le_bytes).collect();
        driver.put(rings + 0x1004, &heads).unwrap();
        driver.put(rings + 0x1002, &ENTRIES.to_le_bytes()).unwrap();
        driver.notify(queue as usize);
    }
}
