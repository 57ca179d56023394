//! The section in which slots are written down, one record an instruction.
//!
//! It is called [`SECTION`] and is not loaded. The name is one of debug information, so that kernels' linker scripts know
//! it, linkers drop what refers to code that they dropped, and modules' checks let it pass. A kernel whose debug
//! information has been stripped has none: keep the `vmlinux` of the build.
//!
//! A record is 16 bytes, little-endian:
//!
//! | bytes | what |
//! |-------|------|
//! | 8     | address of the slot; in a module, a relocation |
//! | 1     | length of the slot |
//! | 1     | where in it the instruction begins |
//! | 1     | length of the instruction |
//! | 1     | its [`Kind`] |
//! | 1     | [`Flags`] |
//! | 2     | its operands: [`Operand`] |
//! | 1     | [`VERSION`] |
//!
//! A slot with several sensitive instructions has a record for each, all with the slot's address and length. Whatever
//! else is in a slot is either a NOP or an ordinary instruction that has been *borrowed* to make it long enough. The
//! kernel never jumps into a slot but to its beginning, so a monitor may fill all of it: with a jump to code that does
//! what the slot did, from its first byte to its last, and jumps back behind it. Borrowed instructions are executed from
//! a copy; those that address memory relative to themselves are flagged, because their copy must be adjusted.
//!
//! The address 0 stands for code that the linker has dropped.

use crate::{kind::Kind, operand::Operand};

/// The section's name.
pub const SECTION: &str = ".debug_funcnames";
/// Bytes of a record.
pub const SIZE: usize = 16;
/// Of the format.
pub const VERSION: u8 = 1;

/// What else there is to know of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// In a replacement that the kernel copies over other code: filled in there, or with code that does not depend on
    /// its place.
    pub const ALTERNATIVE: Self = Self(1);
    /// Not to be filled: the code runs before the kernel's own page tables, or is copied away. There is no slot, only the
    /// instruction.
    pub const LEFT: Self = Self(2);
    /// An instruction in the slot addresses memory relative to itself.
    pub const RELATIVE: Self = Self(4);
    /// Ordinary instructions have been borrowed.
    pub const BORROWED: Self = Self(8);
    /// The last instruction is a call of a function, to which the slot's end is the address to return to.
    pub const CALLS: Self = Self(16);

    /// Whether all of `others` are set.
    #[must_use]
    pub fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// These and others.
    #[must_use]
    pub fn and(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }
}

/// One sensitive instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Address of the slot.
    pub slot: u64,
    /// Its length.
    pub length: u8,
    /// Where in it the instruction begins.
    pub offset: u8,
    /// The instruction's length.
    pub size: u8,
    /// What it does.
    pub kind: Kind,
    /// What else there is to know.
    pub flags: Flags,
    /// What it does it with, source first.
    pub operands: [Operand; 2],
}

impl Record {
    /// Address of the instruction.
    #[must_use]
    pub fn instruction(&self) -> u64 {
        self.slot.wrapping_add(u64::from(self.offset))
    }

    /// Reads one; `None` if this is no record of this version.
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
