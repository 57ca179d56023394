//! The controller's data about itself and its namespaces. What a driver compares after a reset is the
//! machine's own; what it may use is what this controller has.

use super::{command::ALL, registers::VERSION};
use crate::{Disk, disk::Lasting};

/// Size of each structure.
pub const STRUCTURE: usize = 4096;
/// First version of the standard with names of namespaces that Linux compares. Older ones are refused.
const FIRST: u32 = 0x0001_0200;

/// Fields of the controller's structure.
mod controller {
    use std::ops::Range;

    /// Fields that stay: vendor, serial number, model, firmware; arbitration, vendor's identifier; size of a
    /// transfer, number in the subsystem; temperatures; name of the subsystem; power of the first state.
    pub const OWN: [Range<usize>; 6] = [0..76, 77..80, 112..128, 266..270, 768..1024, 2048..2080];
    pub const SERIAL: Range<usize> = 4..24;
    pub const MODEL: Range<usize> = 24..64;
    pub const FIRMWARE: Range<usize> = 64..72;
    pub const SHARING: usize = 76;
    pub const TRANSFER: usize = 77;
    pub const VERSION: Range<usize> = 80..84;
    pub const KIND: usize = 111;
    /// Limits of aborts and of events, each less one; one slot of firmware that cannot be written.
    pub const LIMITS: usize = 258;
    pub const ENTRY_SIZES: usize = 512;
    pub const NAMESPACES: Range<usize> = 516..520;
    pub const OPTIONAL: usize = 520;
    pub const WRITE_CACHE: usize = 525;
    pub const LISTS: Range<usize> = 536..540;
}

/// Bit of the sharing: the controller tells of access to namespaces by several ways.
const WAYS: u8 = 8;
/// Largest number of events that wait, less one.
pub const EVENTS: u8 = 3;
/// Optional commands: Dataset Management, Write Zeroes.
const OPTIONAL: u8 = 4 | 8;
/// There is a volatile cache; a flush may be for all namespaces.
const WRITE_CACHE: u8 = 7;

/// Fields of a namespace's structure.
mod namespace {
    use std::ops::Range;

    pub const SIZES: [usize; 3] = [0, 8, 16];
    pub const FEATURES: usize = 24;
    /// Best sizes and alignments of writes and of ranges that are given up.
    pub const BEST: Range<usize> = 64..74;
    pub const HAS_BEST: u8 = 1 << 4;
    pub const FORMATS: usize = 25;
    pub const FORMAT: usize = 26;
    pub const SHARING: usize = 30;
    pub const ATTRIBUTES: usize = 99;
    pub const NAMES: Range<usize> = 104..128;
    pub const FIRST_FORMAT: usize = 128;
    pub const FORMATS_MAX: usize = 16;
}

/// The controller's data about itself.
#[derive(Clone, Debug)]
pub struct Identity {
    theirs: Vec<u8>,
}

impl Identity {
    /// Takes the structure of the machine's own controller, which may be without its last zeros.
    ///
    /// # Errors
    /// Returns the reason as a clause if the machine's driver could not go on with this controller.
    pub fn new(structure: &[u8]) -> Result<Self, String> {
        let identity = Self { theirs: whole(structure) };
        if long(&identity.theirs, controller::VERSION.start) < FIRST {
            return Err("it speaks a version of NVMe before 1.2".to_owned());
        }
        if identity.theirs[controller::SHARING] & WAYS != 0 {
            return Err("it has several ways to its namespaces (ANA)".to_owned());
        }
        Ok(identity)
    }

    /// Returns the version of the standard, for the register.
    #[must_use]
    pub fn version(&self) -> u32 {
        long(&self.theirs, controller::VERSION.start).min(VERSION)
    }

    /// Returns the serial number.
    #[must_use]
    pub fn serial(&self) -> String {
        text(&self.theirs[controller::SERIAL])
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> String {
        text(&self.theirs[controller::MODEL])
    }

    pub(super) fn firmware(&self) -> &[u8] {
        &self.theirs[controller::FIRMWARE]
    }

    /// Returns the largest length of a transfer in bytes, if there is a limit.
    pub(super) fn transfer_max(&self) -> Option<u64> {
        let exponent = u32::from(self.theirs[controller::TRANSFER]);
        (exponent != 0).then(|| super::prp::PAGE.checked_shl(exponent).unwrap_or(u64::MAX))
    }

    /// Returns the structure for the driver.
    pub(super) fn structure(&self) -> Vec<u8> {
        let mut ours = vec![0; STRUCTURE];
        for range in controller::OWN {
            ours[range.clone()].copy_from_slice(&self.theirs[range]);
        }
        ours[controller::SHARING] = self.theirs[controller::SHARING];
        ours[controller::VERSION].copy_from_slice(&self.version().to_le_bytes());
        ours[controller::KIND] = 1;
        ours[controller::LIMITS..controller::LIMITS + 3].copy_from_slice(&[3, EVENTS, 3]);
        ours[controller::ENTRY_SIZES..controller::ENTRY_SIZES + 2].copy_from_slice(&[0x66, 0x44]);
        ours[controller::NAMESPACES].copy_from_slice(&self.theirs[controller::NAMESPACES]);
        ours[controller::OPTIONAL] = OPTIONAL;
        ours[controller::WRITE_CACHE] = WRITE_CACHE;
        debug_assert!(ours[controller::LISTS].iter().all(|byte| *byte == 0));
        ours
    }
}

/// A namespace, which is a disk for the driver.
pub struct Namespace {
    pub(super) number: u32,
    pub(super) blocks: u64,
    /// Size of a block, as a power of two.
    pub(super) shift: u8,
    pub(super) disk: Lasting,
    theirs: Vec<u8>,
    names: Vec<u8>,
}

impl std::fmt::Debug for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Namespace");
        shown.field("number", &self.number).field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl Namespace {
    /// Takes the structure and the list of names of a namespace of the machine's own controller, and its
    /// content.
    ///
    /// # Errors
    /// Returns the reason as a clause if the machine's driver could not go on with this namespace.
    pub fn new(
        number: u32,
        structure: &[u8],
        names: &[u8],
        disk: Box<dyn Disk + Send>,
    ) -> Result<Self, String> {
        let (shift, blocks) = Self::measure(structure)?;
        if number == 0 || number == ALL {
            return Err("its number is none".to_owned());
        }
        let disk = Lasting::new(disk);
        Ok(Self { number, blocks, shift, disk, theirs: whole(structure), names: whole(names) })
    }

    /// Returns the size of a block, as a power of two, and the number of blocks.
    ///
    /// # Errors
    /// Returns the reason as a clause if the format is none that the controller has.
    pub fn measure(structure: &[u8]) -> Result<(u8, u64), String> {
        let theirs = whole(structure);
        let format = theirs[namespace::FORMAT];
        // Formats beyond 16 have two bits more of their number in another place.
        let number = usize::from(format & 0xF | format >> 1 & 0x30);
        if number >= namespace::FORMATS_MAX {
            return Err(format!("it has the format {number}"));
        }
        let format = long(&theirs, namespace::FIRST_FORMAT + 4 * number);
        if format & 0xFFFF != 0 {
            return Err("its blocks have metadata".to_owned());
        }
        let (shift, blocks) = ((format >> 16) as u8, wide(&theirs, 0));
        if !(9..=12).contains(&shift) || blocks == 0 || blocks > u64::MAX >> 13 {
            return Err(format!("it has {blocks} blocks of 2^{shift} bytes"));
        }
        Ok((shift, blocks))
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks << self.shift
    }

    /// Returns the structure for the driver.
    pub(super) fn structure(&self) -> Vec<u8> {
        let mut ours = vec![0; STRUCTURE];
        for at in namespace::SIZES {
            ours[at..at + 8].copy_from_slice(&self.blocks.to_le_bytes());
        }
        ours[namespace::FEATURES] = self.theirs[namespace::FEATURES] & namespace::HAS_BEST;
        for range in [namespace::BEST, namespace::NAMES] {
            ours[range.clone()].copy_from_slice(&self.theirs[range]);
        }
        ours[namespace::SHARING] = self.theirs[namespace::SHARING] & 1;
        ours[namespace::ATTRIBUTES] = u8::from(self.disk.is_read_only());
        ours[namespace::FIRST_FORMAT + 2] = self.shift;
        debug_assert_eq!((ours[namespace::FORMATS], ours[namespace::FORMAT]), (0, 0));
        ours
    }

    /// Returns the names for the driver.
    pub(super) fn names(&self) -> &[u8] {
        &self.names
    }
}

fn whole(structure: &[u8]) -> Vec<u8> {
    let mut whole = structure[..structure.len().min(STRUCTURE)].to_vec();
    whole.resize(STRUCTURE, 0);
    whole
}

fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn wide(bytes: &[u8], at: usize) -> u64 {
    u64::from(long(bytes, at)) | u64::from(long(bytes, at + 4)) << 32
}

fn text(bytes: &[u8]) -> String {
    let text: String =
        bytes.iter().filter(|byte| (0x20..0x7F).contains(*byte)).map(|byte| char::from(*byte)).collect();
    text.trim().to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::testing::Fake;

    /// Returns the structure of a controller: version 1.4, transfers of at most 512 KiB.
    pub fn controller() -> Vec<u8> {
        let mut bytes = vec![0; STRUCTURE];
        bytes[0..4].copy_from_slice(&[0x4D, 0x14, 0x4D, 0x14]);
        bytes[4..24].copy_from_slice(b"S4EWNX0R           7");
        bytes[24..64].copy_from_slice(b"Fast SSD 970                            ");
        bytes[64..72].copy_from_slice(b"2B2QEXM7");
        bytes[77] = 7;
        bytes[78] = 4;
        bytes[80..84].copy_from_slice(&0x0001_0400_u32.to_le_bytes());
        bytes[256..258].copy_from_slice(&[0xFF, 0xFF]);
        bytes[516] = 2;
        bytes[520] = 0xFF;
        bytes[536] = 1;
        bytes[768..775].copy_from_slice(b"nqn.one");
        bytes
    }

    /// Returns the structure of a namespace of so many blocks of 512 bytes.
    pub fn namespace(blocks: u64) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[..8].copy_from_slice(&blocks.to_le_bytes());
        bytes[25] = 1;
        bytes[26] = 1;
        bytes[30] = 0xFF;
        bytes[104..128].fill(0x5E);
        bytes[128..132].copy_from_slice(&[8, 0, 12, 0]);
        bytes[132..136].copy_from_slice(&[0, 0, 9, 0]);
        bytes
    }

    fn fake() -> Box<Fake> {
        Box::new(Fake::new(0))
    }

    #[test]
    fn the_driver_finds_the_machine_s_identity_with_this_controller_s_abilities() {
        let identity = Identity::new(&controller()).unwrap();
        assert_eq!(
            (identity.serial().as_str(), identity.model().as_str()),
            ("S4EWNX0R           7", "Fast SSD 970")
        );
        assert_eq!((identity.version(), identity.transfer_max()), (0x1_0400, Some(512 << 10)));
        let structure = identity.structure();
        assert_eq!(structure[0..256], {
            let mut same = controller()[0..256].to_vec();
            same[111] = 1;
            same
        });
        assert_eq!(structure[768..1024], controller()[768..1024]);
        assert_eq!(structure[256..263], [0, 0, 3, 3, 3, 0, 0], "no optional command of administration");
        assert_eq!((structure[520], structure[525], structure[536]), (12, 7, 0));
        let mut newer = controller();
        newer[80..84].copy_from_slice(&0x0002_0000_u32.to_le_bytes());
        newer[77] = 0;
        let newer = Identity::new(&newer).unwrap();
        assert_eq!((newer.version(), newer.transfer_max()), (VERSION, None));
    }

    #[test]
    fn a_namespace_keeps_its_size_its_block_and_its_names() {
        let namespace = Namespace::new(1, &namespace(2048), &[3, 4], fake()).unwrap();
        assert_eq!(namespace.bytes(), 1 << 20);
        let structure = namespace.structure();
        for at in [0, 8, 16] {
            assert_eq!(wide(&structure, at), 2048);
        }
        assert_eq!((structure[25], structure[26], structure[30], structure[99]), (0, 0, 1, 0));
        assert_eq!(long(&structure, 128), 9 << 16);
        assert_eq!(structure[104..128], [0x5E; 24]);
        assert_eq!((namespace.names().len(), namespace.names()[1]), (STRUCTURE, 4));
        let read_only = Box::new(Fake(Fake::new(0).0, true));
        let namespace = Namespace::new(1, &self::namespace(8), &[], read_only).unwrap();
        assert_eq!(namespace.structure()[99], 1);
    }

    #[test]
    fn what_a_driver_could_not_go_on_with_is_refused() {
        let refused = |at: usize, byte| {
            let mut bytes = controller();
            bytes[at] = byte;
            Identity::new(&bytes).unwrap_err()
        };
        assert!(refused(76, 8).contains("ANA"));
        assert!(refused(82, 0).contains("before 1.2"));
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = namespace(100);
            change(&mut bytes);
            Namespace::new(1, &bytes, &[], fake()).unwrap_err()
        };
        assert!(refused(&|bytes| bytes[26] = 0).contains("metadata"));
        assert!(refused(&|bytes| bytes[26] = 0x21).contains("format 17"));
        assert!(refused(&|bytes| bytes[134] = 13).contains("2^13"));
        assert!(refused(&|bytes| bytes[0] = 0).contains("0 blocks"));
        assert!(Namespace::new(ALL, &namespace(1), &[], fake()).unwrap_err().contains("number"));
        assert!(Namespace::measure(&[]).is_err());
    }
}
