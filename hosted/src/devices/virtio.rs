//! The registers of a virtio device in memory (virtio 1.2, 4.2: version 2 of the transport), with one queue.

use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::block::Block;
use crate::{
    error::{Error, Result},
    memory::Memory,
};

/// Bytes of a device's registers.
pub const WINDOW: u64 = 0x1000;
const QUEUE_SIZE: u16 = 256;
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
const VENDOR: u32 = 0x4372_654D;
const VERSION_1: u64 = 1 << 32;
const USED_BUFFER: u32 = 1;

/// Offsets of registers.
mod register {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE: u64 = 0x08;
    pub const VENDOR: u64 = 0x0C;
    pub const FEATURES: u64 = 0x10;
    pub const FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_MOST: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const NOTIFY: u64 = 0x50;
    pub const INTERRUPT: u64 = 0x60;
    pub const ACKNOWLEDGE: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const DESCRIPTORS: u64 = 0x80;
    pub const AVAILABLE: u64 = 0x90;
    pub const USED: u64 = 0xA0;
    pub const GENERATION: u64 = 0xFC;
    pub const CONFIGURATION: u64 = 0x100;
}

/// The guest's memory as the queues' library sees it.
pub type View = GuestMemoryMmap<()>;

/// Another view of the same memory.
///
/// # Errors
/// If the library does not like it.
pub fn view(memory: &Memory) -> Result<View> {
    let wrong = |what: &str| Error::new(format!("cannot give devices the guest's memory: {what}"));
    let start = memory.pointer(0, memory.size()).ok_or_else(|| wrong("there is none"))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: The guest's memory is mapped there for as long as the process lives.
    let region =
        unsafe { MmapRegion::build_raw(start, memory.size() as usize, protection, libc::MAP_SHARED) };
    let region = region.map_err(|error| wrong(&error.to_string()))?;
    let region = GuestRegionMmap::new(region, GuestAddress(0)).ok_or_else(|| wrong("its size"))?;
    View::from_regions(vec![region]).map_err(|error| wrong(&error.to_string()))
}

/// A disk behind its registers.
#[derive(Debug)]
pub struct Disk {
    block: Block,
    queue: Queue,
    selected: u32,
    features_half: u32,
    status: u32,
    interrupt: u32,
}

impl Disk {
    /// Of a file.
    ///
    /// # Errors
    /// If there can be no queue.
    pub fn new(block: Block) -> Result<Self> {
        let queue =
            Queue::new(QUEUE_SIZE).map_err(|error| Error::new(format!("cannot make a queue: {error}")))?;
        Ok(Self { block, queue, selected: 0, features_half: 0, status: 0, interrupt: 0 })
    }

    fn features(&self) -> u64 {
        self.block.features() | VERSION_1
    }

    /// Reads a register.
    #[must_use]
    pub fn read(&self, offset: u64, size: usize) -> u64 {
        if let Some(at) = offset.checked_sub(register::CONFIGURATION) {
            return self.block.configuration(at, size);
        }
        let is_first = self.selected == 0;
        let value = match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE => Block::DEVICE,
            register::VENDOR => VENDOR,
            register::FEATURES if self.features_half == 0 => self.features() as u32,
            register::FEATURES if self.features_half == 1 => (self.features() >> 32) as u32,
            register::QUEUE_MOST if is_first => self.queue.max_size().into(),
            register::QUEUE_READY if is_first => self.queue.ready().into(),
            register::INTERRUPT => self.interrupt,
            register::STATUS => self.status,
            register::GENERATION => 0,
            _ => 0,
        };
        value.into()
    }

    /// Writes a register. Says whether the driver is to be interrupted.
    pub fn write(&mut self, offset: u64, value: u64, memory: &Memory, view: &View) -> bool {
        let value = value as u32;
        let is_first = self.selected == 0;
        let half = |base: u64| match offset - base {
            0 => (Some(value), None),
            _ => (None, Some(value)),
        };
        match offset {
            register::FEATURES_SELECT => self.features_half = value,
            // What is offered may be taken or not; nothing here depends on it.
            register::DRIVER_FEATURES | register::DRIVER_FEATURES_SELECT => {}
            register::QUEUE_SELECT => self.selected = value,
            register::QUEUE_SIZE if is_first => self.queue.set_size(value.min(u32::from(QUEUE_SIZE)) as u16),
            register::QUEUE_READY if is_first => self.queue.set_ready(value == 1),
            register::NOTIFY if value == 0 => return self.work(memory, view),
            register::ACKNOWLEDGE => self.interrupt &= !value,
            register::STATUS if value == 0 => {
                self.queue.reset();
                (self.status, self.interrupt, self.selected) = (0, 0, 0);
            }
            register::STATUS => self.status = value,
            at if is_first && at & !4 == register::DESCRIPTORS => {
                let (low, high) = half(register::DESCRIPTORS);
                self.queue.set_desc_table_address(low, high);
            }
            at if is_first && at & !4 == register::AVAILABLE => {
                let (low, high) = half(register::AVAILABLE);
                self.queue.set_avail_ring_address(low, high);
            }
            at if is_first && at & !4 == register::USED => {
                let (low, high) = half(register::USED);
                self.queue.set_used_ring_address(low, high);
            }
            _ => {}
        }
        false
    }

    /// Does all requests that wait.
    fn work(&mut self, memory: &Memory, view: &View) -> bool {
        if !self.queue.ready() || !self.queue.is_valid(view) {
            return false;
        }
        let mut any = false;
        while let Some(chain) = self.queue.pop_descriptor_chain(view) {
            let head = chain.head_index();
            let written = self.block.perform(chain, memory);
            // The rings were valid above. If they are not any more, the driver waits for what it has destroyed.
            any |= self.queue.add_used(view, head, written).is_ok();
        }
        if any {
            self.interrupt |= USED_BUFFER;
        }
        any && self.queue.needs_notification(view).unwrap_or(true)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tests share the one address of the direct map.
    static MEMORY: std::sync::Mutex<Option<Memory>> = std::sync::Mutex::new(None);
    const SIZE: u64 = 1 << 20;

    fn with_disk<T>(test: impl FnOnce(&mut Disk, &Memory, &View) -> T) -> T {
        let mut shared = MEMORY.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let memory = shared.get_or_insert_with(|| Memory::new(SIZE).unwrap());
        let view = view(memory).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0x5A; 4096]).unwrap();
        let mut disk = Disk::new(Block::open(file.path(), false).unwrap()).unwrap();
        test(&mut disk, memory, &view)
    }

    /// The rings at fixed places, and one request of a header, data and a status.
    fn request(disk: &mut Disk, memory: &Memory, view: &View, kind: u32, sector: u64, reads: bool) -> u8 {
        const NEXT: u16 = 1;
        const WRITE: u16 = 2;
        let data_flags = NEXT | if reads { WRITE } else { 0 };
        let parts = [(0x4000, 16, NEXT, 1), (0x5000, 512, data_flags, 2), (0x6000, 1, WRITE, 0)];
        for (index, (address, length, flags, next)) in parts.into_iter().enumerate() {
            let mut bytes = u64::to_le_bytes(address).to_vec();
            bytes.extend(u32::to_le_bytes(length));
            bytes.extend(u16::to_le_bytes(flags));
            bytes.extend(u16::to_le_bytes(next));
            memory.write(0x1000 + index as u64 * 16, &bytes).unwrap();
        }
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        memory.write(0x4000, &header).unwrap();
        memory.write(0x6000, &[0xFF]).unwrap();
        memory.write(0x2000, &[0, 0, 1, 0, 0, 0]).unwrap();
        memory.write(0x3000, &[0; 16]).unwrap();
        disk.write(register::STATUS, 0, memory, view);
        for (register, value) in [
            (register::QUEUE_SIZE, 4),
            (register::DESCRIPTORS, 0x1000),
            (register::AVAILABLE, 0x2000),
            (register::USED, 0x3000),
            (register::QUEUE_READY, 1),
        ] {
            disk.write(register, value, memory, view);
        }
        assert!(disk.write(register::NOTIFY, 0, memory, view));
        let mut status = [0];
        memory.read(0x6000, &mut status).unwrap();
        status[0]
    }

    #[test]
    fn sectors_are_written_and_read_and_others_refused() {
        with_disk(|disk, memory, view| {
            memory.write(0x5000, &[7; 512]).unwrap();
            assert_eq!(request(disk, memory, view, 1, 3, false), 0);
            memory.write(0x5000, &[0; 512]).unwrap();
            assert_eq!(request(disk, memory, view, 0, 3, true), 0);
            let mut read = [0; 512];
            memory.read(0x5000, &mut read).unwrap();
            assert_eq!(read, [7; 512]);
            // Behind the end; a number that wraps; into what may only be read; of an unknown kind.
            assert_eq!(request(disk, memory, view, 0, 8, true), 1);
            assert_eq!(request(disk, memory, view, 1, u64::MAX, false), 1);
            assert_eq!(request(disk, memory, view, 0, 0, false), 1);
            assert_eq!(request(disk, memory, view, 77, 0, true), 2);
            assert_eq!(disk.read(register::CONFIGURATION, 8), 8);
        });
    }

    proptest! {
        #[test]
        fn no_driver_makes_it_panic(
            writes in proptest::collection::vec((0_u64..0x110, 0_u64..0x4000), 1..60),
            words in proptest::collection::vec((0_u64..0x4000, any::<u64>()), 0..40),
        ) {
            with_disk(|disk, memory, view| {
                for (at, value) in words {
                    memory.write_long(at, value).unwrap();
                }
                for (register, value) in writes {
                    disk.write(register & !3, value, memory, view);
                    disk.write(register::NOTIFY, 0, memory, view);
                    let _ = disk.read(register, 4);
                }
            });
        }
    }
}
