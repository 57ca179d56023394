//! The memory of the life that ended, by physical and by kernel address.

use mercury_abi::{restart::SavedCpu, snapshot::READ_LIST_MAX};
use mercury_control::device::{Cursor, Device};
use std::{cell::RefCell, collections::BTreeMap, mem::offset_of};

pub const PAGE: usize = 4096;
/// Address at which the kernel maps its text and data (`__START_KERNEL_map`), and the end of both.
const KERNEL_MAP: u64 = 0xFFFF_FFFF_8000_0000;
const KERNEL_END: u64 = 0xFFFF_FFFF_C000_0000;
/// Span of the addresses at which the kernel maps all memory.
const DIRECT_MAP_BYTES: u64 = 1 << 46;
/// Bits of a page-table entry.
const PRESENT: u64 = 1 << 0;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;

/// Access to frames.
pub trait Frames {
    /// Returns the content of a frame; `None` if it is not known.
    fn frame(&self, phys: u64) -> Option<Vec<u8>>;
}

impl Frames for Device {
    fn frame(&self, phys: u64) -> Option<Vec<u8>> {
        let mut cursor = Cursor { next_phys: phys, end_phys: phys + PAGE as u64 };
        self.snapshot_read(&mut cursor, READ_LIST_MAX)
            .ok()
            .map(|frames| frames.data)
            .filter(|data| !data.is_empty())
    }
}

/// The kernel's information for tools that read its memory (`VMCOREINFO`).
#[derive(Clone, Debug, Default)]
pub struct Told(BTreeMap<String, String>);

impl Told {
    /// Parses the lines, which follow a note's header.
    pub fn of(note: &[u8]) -> Self {
        let text = String::from_utf8_lossy(note);
        let line = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        Self(text.trim_end_matches('\0').split(['\n', '\0']).filter_map(line).collect())
    }

    /// Returns the address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.0.get(&format!("SYMBOL({name})"))?, 16).ok()
    }

    /// Returns the offset of a structure's member.
    pub fn offset(&self, name: &str) -> Option<u64> {
        self.0.get(&format!("OFFSET({name})"))?.parse().ok()
    }

    /// Returns the size of a structure.
    pub fn size(&self, name: &str) -> Option<u64> {
        self.0.get(&format!("SIZE({name})"))?.parse().ok()
    }

    /// Returns a number that may be negative.
    pub fn number(&self, name: &str) -> Option<i64> {
        self.0.get(&format!("NUMBER({name})"))?.parse().ok()
    }
}

/// Memory, and what its kernel tells of it.
pub struct Memory<'a, F> {
    frames: &'a F,
    /// Frames that were read.
    known: RefCell<BTreeMap<u64, Option<Vec<u8>>>>,
    pub told: Told,
    /// Address at which the kernel maps all memory.
    direct_map: u64,
}

impl<'a, F: Frames> Memory<'a, F> {
    /// Returns memory with the kernel's note at `note`: address and length. `saved_phys` is the state of a
    /// CPU at the instant, which begins with its own address in the kernel.
    pub fn new(frames: &'a F, note: (u64, u64), saved_phys: u64) -> Self {
        let known = RefCell::default();
        let mut memory = Self { frames, known, told: Told::default(), direct_map: 0 };
        let virt = saved_phys + offset_of!(SavedCpu, virt) as u64;
        memory.direct_map = memory.word_at(virt).map_or(0, |virt| virt.wrapping_sub(saved_phys));
        let mut bytes = vec![0; note.1.min(1 << 20) as usize];
        if memory.read_phys(note.0, &mut bytes).is_some() {
            memory.told = Told::of(&bytes);
        }
        memory
    }

    /// Reads memory at a physical address; `None` if a part of it is not known.
    pub fn read_phys(&self, phys: u64, bytes: &mut [u8]) -> Option<()> {
        let mut at = phys;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (frame, offset) = (at & !(PAGE as u64 - 1), at as usize % PAGE);
            let mut known = self.known.borrow_mut();
            let page = known.entry(frame).or_insert_with(|| self.frames.frame(frame)).as_ref()?;
            let count = rest.len().min(PAGE - offset);
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(page.get(offset..offset + count)?);
            (at, rest) = (at + count as u64, later);
        }
        Some(())
    }

    fn word_at(&self, phys: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read_phys(phys, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Reads memory at an address of the kernel.
    pub fn read(&self, virt: u64, bytes: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = virt.checked_add(done as u64)?;
            let count = (bytes.len() - done).min(PAGE - at as usize % PAGE);
            self.read_phys(self.translate(at)?, &mut bytes[done..done + count])?;
            done += count;
        }
        Some(())
    }

    /// Reads a word at an address of the kernel.
    pub fn word(&self, virt: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(virt, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Reads half a word at an address of the kernel.
    pub fn half(&self, virt: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(virt, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }

    /// Returns the physical address of an address of the kernel.
    fn translate(&self, virt: u64) -> Option<u64> {
        let kernel =
            |virt: u64| Some((virt - KERNEL_MAP).wrapping_add_signed(self.told.number("phys_base")?));
        if (KERNEL_MAP..KERNEL_END).contains(&virt) {
            return kernel(virt);
        }
        if self.direct_map != 0 && virt.wrapping_sub(self.direct_map) < DIRECT_MAP_BYTES {
            return Some(virt - self.direct_map);
        }
        let mut table = kernel(self.told.symbol("swapper_pg_dir")?)?;
        let five = self.told.number("pgtable_l5_enabled").unwrap_or(0) != 0;
        let mut shift = if five { 48 } else { 39 };
        loop {
            let entry = self.word_at(table + 8 * (virt >> shift & 0x1FF))?;
            if entry & PRESENT == 0 {
                return None;
            }
            if shift == 12 || entry & LARGE != 0 && shift <= 30 {
                let inside = (1 << shift) - 1;
                return Some(entry & ADDRESS & !inside | virt & inside);
            }
            table = entry & ADDRESS;
            shift -= 9;
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Memory from address 0 on.
    pub struct Model(pub RefCell<Vec<u8>>);

    impl Frames for Model {
        fn frame(&self, phys: u64) -> Option<Vec<u8>> {
            self.0.borrow().get(phys as usize..phys as usize + PAGE).map(<[u8]>::to_vec)
        }
    }

    impl Model {
        pub fn new(pages: usize) -> Self {
            Self(RefCell::new(vec![0; pages * PAGE]))
        }

        pub fn put(&self, phys: u64, bytes: &[u8]) {
            self.0.borrow_mut()[phys as usize..][..bytes.len()].copy_from_slice(bytes);
        }

        pub fn put_word(&self, phys: u64, word: u64) {
            self.put(phys, &word.to_le_bytes());
        }
    }

    #[test]
    fn addresses_of_the_kernel_are_found() {
        let model = Model::new(16);
        let told = "NUMBER(phys_base)=4096\nSYMBOL(swapper_pg_dir)=ffffffff80001000\nOFFSET(a.b)=24\n";
        model.put(0xF000, told.as_bytes());
        model.put_word(0xE000, 0xFFFF_8880_0000_E000);
        // The kernel's tables, with a page of a stack at 0xFFFF_C900_0020_1000.
        let stack = 0xFFFF_C900_0020_1000_u64;
        let tables = [0x2000, 0x3000, 0x4000, 0x5000, 0x6000_u64];
        for (level, pair) in tables.windows(2).enumerate() {
            let index = stack >> (39 - 9 * level) & 0x1FF;
            model.put_word(pair[0] + 8 * index, pair[1] | PRESENT | 1 << 63);
        }
        model.put_word(0x6018, 7);
        model.put_word(0x6FFC, 0x1122_3344_5566_7788);
        let memory = Memory::new(&model, (0xF000, 4096), 0xE000);
        assert_eq!(memory.told.offset("a.b"), Some(24));
        for virt in [stack + 0x18, 0xFFFF_8880_0000_6018, KERNEL_MAP + 0x5018] {
            assert_eq!(memory.word(virt), Some(7), "{virt:#x}");
        }
        assert_eq!(memory.half(stack + 0xFFC), Some(0x5566_7788));
        assert_eq!(memory.word(stack + 0xFFC), None, "the next page is not mapped");
        assert_eq!(memory.word(0xFFFF_8880_0010_0000), None, "there is no such frame");
    }
}
