//! What goes with an offer, and with the last word of what was sent: the machine, as an image says it too.

use mercury_image::Machine;
use mercury_migration::{
    hail::Secret,
    wire::{pack_text, unpack_text},
};
use serde::{Deserialize, Serialize};
use std::io;

/// A machine that is to move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The machine. File systems have their marks only when it stands still.
    pub machine: Machine,
    /// How many CPUs are online.
    pub cpus: usize,
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
        let offer = Offer { machine, cpus: 2, hails: [3; 32], streams: 2 };
        let packed = offer.pack().expect("packed");
        let found = Offer::unpack(&packed).expect("unpacked");
        assert_eq!(found, offer);
        assert_eq!(found.memory(), vec![0x1000..0x2000, 0x2000..0x3000]);
        assert!(Offer::unpack(b"none").is_err());
    }
}
