//! The text of an offer, and of the last word about the sent data: the machine, in the format of an
//! image.

use super::disk::Disk;
use mercury_image::{FileSystem, Machine};
use mercury_migration::{
    announcement::Secret,
    wire::{pack_text, unpack_text},
};
use serde::{Deserialize, Serialize};
use std::io;

/// A disk that moves with the machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OfferedDisk {
    /// The disk at the source.
    pub disk: Disk,
    /// The devices of the file systems on the disk, which the destination does not have before the
    /// disk arrives.
    pub file_systems: Vec<String>,
    /// Digest of all its chunks; set with the last word about the sent data.
    pub digest: String,
}

/// A machine that is to move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The machine. Its file systems have fingerprints only when it stands still.
    pub machine: Machine,
    /// Number of CPUs that are online.
    pub cpus: usize,
    /// Disks that move with the machine.
    pub disks: Vec<OfferedDisk>,
    /// Secret for the announcements of this attempt. A peer that has only seen the pairing token
    /// does not have it.
    pub secret: Secret,
    /// Number of streams for its pages.
    pub streams: u32,
    /// True if the machine is a guest of a host in use, which leaves no tombstone. An earlier Mercury did not
    /// say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_guest: bool,
}

impl Offer {
    /// Encodes the offer for the wire.
    ///
    /// # Errors
    ///
    /// Returns an error if it is too long.
    pub fn pack(&self) -> io::Result<Vec<u8>> {
        pack_text(&serde_json::to_vec(self)?)
    }

    /// Decodes an offer from the wire.
    ///
    /// # Errors
    ///
    /// Returns an error if the text is no offer.
    pub fn unpack(packed: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(&unpack_text(packed)?)?)
    }

    /// Returns the file systems that the destination must have before anything arrives: those on no
    /// disk that moves.
    #[must_use]
    pub fn shared_file_systems(&self) -> Vec<FileSystem> {
        let comes = |one: &&FileSystem| self.disks.iter().any(|disk| disk.file_systems.contains(&one.device));
        self.machine.file_systems.iter().filter(|one| !comes(one)).cloned().collect()
    }

    /// Returns the memory that will arrive: physical addresses.
    #[must_use]
    pub fn memory(&self) -> Vec<std::ops::Range<u64>> {
        kept(&self.machine)
    }
}

/// Returns the memory of a machine that an image of it holds.
#[must_use]
pub fn kept(machine: &Machine) -> Vec<std::ops::Range<u64>> {
    const PAGE: u64 = 4096;
    let kept = machine.ranges.iter().filter(|range| range.kind == mercury_image::Kind::Kept);
    // The driver gets the same saturated values, and refuses impossible addresses.
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
        let offer =
            Offer { machine, cpus: 2, disks: Vec::new(), secret: [3; 32], streams: 2, is_guest: true };
        let packed = offer.pack().expect("packed");
        let found = Offer::unpack(&packed).expect("unpacked");
        assert_eq!(found, offer);
        assert_eq!(found.memory(), vec![0x1000..0x2000, 0x2000..0x3000]);
        assert!(Offer::unpack(b"none").is_err());
    }
}
