//! What goes with an offer, and with the last word of what was sent: the machine, as an image says it too.

use super::disk::Disk;
use mercury_image::{FileSystem, Machine};
use mercury_migration::{
    hail::Secret,
    wire::{pack_text, unpack_text},
};
use serde::{Deserialize, Serialize};
use std::io;

/// A disk that goes along.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OfferedDisk {
    /// What it is at the source.
    pub disk: Disk,
    /// The devices of the file systems that are on it: they are not there before it is.
    pub file_systems: Vec<String>,
    /// With the last word of what was sent: the digest of all its chunks.
    pub digest: String,
}

/// A machine that is to move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The machine. File systems have their marks only when it stands still.
    pub machine: Machine,
    /// How many CPUs are online.
    pub cpus: usize,
    /// The disks that go along.
    pub disks: Vec<OfferedDisk>,
    /// What hails of this attempt are made with: nobody has it who has only seen the line.
    pub hails: Secret,
    /// How many streams its pages come by.
    pub streams: u32,
}

impl Offer {
    /// As it goes over the wire.
    ///
    /// # Errors
    /// If it is too long.
    pub fn pack(&self) -> io::Result<Vec<u8>> {
        pack_text(&serde_json::to_vec(self)?)
    }

    /// What came over the wire.
    ///
    /// # Errors
    /// If it is no offer.
    pub fn unpack(packed: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(&unpack_text(packed)?)?)
    }

    /// The file systems that must be here before anything comes: those that come with no disk.
    #[must_use]
    pub fn shared_file_systems(&self) -> Vec<FileSystem> {
        let comes = |one: &&FileSystem| self.disks.iter().any(|disk| disk.file_systems.contains(&one.device));
        self.machine.file_systems.iter().filter(|one| !comes(one)).cloned().collect()
    }

    /// The memory that is to come: physical addresses.
    #[must_use]
    pub fn memory(&self) -> Vec<std::ops::Range<u64>> {
        kept(&self.machine)
    }
}

/// The memory of a machine that an image of it holds.
#[must_use]
pub fn kept(machine: &Machine) -> Vec<std::ops::Range<u64>> {
    const PAGE: u64 = 4096;
    let kept = machine.ranges.iter().filter(|range| range.kind == mercury_image::Kind::Kept);
    // What cannot be an address is refused by the driver, which is told the same.
    kept.map(|range| range.start_phys..range.start_phys.saturating_add(range.pages.saturating_mul(PAGE)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_image::{Kind, Range};

    #[test]
    fn an_offer_comes_back() {
        let range = |start_phys, pages, kind| Range { start_phys, pages, kind };
        let machine = Machine {
            host: "a".into(),
            ranges: vec![
                range(0x1000, 1, Kind::Kept),
                range(0x2000, 1, Kind::Kept),
                range(0x3000, 1, Kind::Free),
            ],
            ..Machine::default()
        };
        let offer = Offer { machine, cpus: 2, disks: Vec::new(), hails: [3; 32], streams: 2 };
        let packed = offer.pack().expect("packed");
        let found = Offer::unpack(&packed).expect("unpacked");
        assert_eq!(found, offer);
        assert_eq!(found.memory(), vec![0x1000..0x2000, 0x2000..0x3000]);
        assert!(Offer::unpack(b"none").is_err());
    }
}
