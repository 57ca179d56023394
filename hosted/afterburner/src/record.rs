//! The section in which slots are recorded, with one record per instruction.
//!
//! Its name is [`SECTION`], and it is not loaded. The name is one of debug information. Kernels'
//! linker scripts therefore know it, linkers drop its references to dropped code, and modules'
//! checks let it pass. A kernel without its debug information has no records: keep the `vmlinux` of
//! the build.
//!
//! A record is 16 bytes, little-endian:
//!
//! | bytes | what |
//! |-------|------|
//! | 8     | address of the slot; in a module, a relocation |
//! | 1     | length of the slot in bytes |
//! | 1     | offset of the instruction in the slot |
//! | 1     | length of the instruction in bytes |
//! | 1     | its [`Kind`] |
//! | 1     | [`Flags`] |
//! | 2     | its operands: [`Operand`] |
//! | 1     | [`VERSION`] |
//!
//! A slot with several sensitive instructions has a record for each, all with the slot's address
//! and length. Every other byte of a slot belongs to a NOP, or to an ordinary instruction that was
//! *borrowed* to make the slot long enough. The kernel jumps to the beginning of a slot only. A
//! monitor may therefore fill all of it with a jump to code that does the same as the slot, from
//! its first byte to its last, and jumps back after it. Borrowed instructions are executed from a
//! copy. Those that address memory relative to themselves are flagged, because their copy must be
//! adjusted.
//!
//! The address 0 stands for code that the linker has dropped.

use crate::{kind::Kind, operand::Operand};

/// Name of the section.
pub const SECTION: &str = ".debug_funcnames";
/// Size of a record in bytes.
pub const SIZE: usize = 16;
/// Version of the format.
pub const VERSION: u8 = 1;

/// Properties of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// The slot is in a replacement that the kernel copies over other code. A monitor fills it
    /// there, or with code that does not depend on its place.
    pub const ALTERNATIVE: Self = Self(1);
    /// There is no slot, only the instruction, and it must not be replaced. The code runs before
    /// the kernel's own page tables, or is copied away.
    pub const LEFT: Self = Self(2);
    /// An instruction in the slot addresses memory relative to itself.
    pub const RELATIVE: Self = Self(4);
    /// Ordinary instructions were borrowed for the slot.
    pub const BORROWED: Self = Self(8);
    /// The last instruction is a call of a function, and the slot's end is the address to return
    /// to.
    pub const CALLS: Self = Self(16);

    /// Returns true if all flags of `others` are set.
    #[must_use]
    pub fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns these flags and those of `other`.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }
}

/// The record of one sensitive instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Address of the slot.
    pub slot: u64,
    /// Length of the slot in bytes.
    pub length: u8,
    /// Offset of the instruction in the slot.
    pub offset: u8,
    /// Length of the instruction in bytes.
    pub size: u8,
    /// Kind of the instruction.
    pub kind: Kind,
    /// Properties of the slot.
    pub flags: Flags,
    /// Operands of the instruction, source first.
    pub operands: [Operand; 2],
}

impl Record {
    /// Returns the address of the instruction.
    #[must_use]
    pub fn instruction(&self) -> u64 {
        self.slot.wrapping_add(u64::from(self.offset))
    }

    /// Parses a record; `None` if the bytes are no record of this version.
    #[must_use]
    pub fn read(bytes: &[u8; SIZE]) -> Option<Self> {
        let (slot, rest) = bytes.split_first_chunk()?;
        let &[length, offset, size, kind, flags, source, target, version] = rest else { return None };
        (version == VERSION).then_some(())?;
        Some(Self {
            slot: u64::from_le_bytes(*slot),
            length,
            offset,
            size,
            kind: Kind::from_number(kind)?,
            flags: Flags(flags),
            operands: [Operand(source), Operand(target)],
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_and_others_are_not() {
        let mut bytes = [0, 0, 0, 0x81, 0xFF, 0xFF, 0xFF, 0xFF, 5, 1, 3, 46, 9, 0x10, 0x23, 1];
        let record = Record::read(&bytes).unwrap();
        assert_eq!((record.slot, record.instruction()), (0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0001));
        assert_eq!((record.kind, record.length, record.size), (Kind::WriteControl, 5, 3));
        assert!(record.flags.has(Flags::BORROWED) && record.flags.has(Flags::ALTERNATIVE));
        assert!(!record.flags.has(Flags::LEFT));
        assert_eq!(record.operands.map(Operand::describe), ["rax", "cr3"]);
        bytes[11] = 126;
        assert_eq!(Record::read(&bytes), None);
        (bytes[11], bytes[15]) = (46, 2);
        assert_eq!(Record::read(&bytes), None);
    }
}
