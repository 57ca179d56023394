//! Memory of the firmware. It stays compressed until the reader of an image asks for it: the reader decides
//! how much it allocates.

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Place, Result},
    record::{MAGIC, PAGE, is_run},
};

/// Level of compression. There is little of it, and it is read once.
const LEVEL: i32 = 9;
/// Place of the description in an image.
const DESCRIPTION: Place = Place { record: 0, offset: MAGIC.len() as u64 + 4 };

/// A range of the firmware's memory, with its content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirmwareMemory {
    /// Physical address of the first byte, page-aligned.
    pub start_phys: u64,
    /// Length in bytes, whole pages.
    pub length: u64,
    /// Content, as a zstd frame.
    #[serde(with = "crate::hexadecimal")]
    packed: Vec<u8>,
}

impl FirmwareMemory {
    /// Largest length of a range.
    pub const LENGTH_MAX: u64 = 16 << 20;

    /// Packs the content of memory from `start_phys` on.
    ///
    /// # Errors
    /// The compressor fails.
    pub fn new(start_phys: u64, content: &[u8]) -> Result<Self> {
        let packed = zstd::bulk::compress(content, LEVEL)?;
        Ok(Self { start_phys, length: content.len() as u64, packed })
    }

    /// Returns the content: [`FirmwareMemory::length`] bytes.
    ///
    /// # Errors
    /// The range is no memory, is longer than [`FirmwareMemory::LENGTH_MAX`], or cannot be unpacked.
    pub fn content(&self) -> Result<Vec<u8>> {
        let damaged = |what: &str| {
            let text = format!("the firmware's memory at {:#x} {what}", self.start_phys);
            Error::Damaged(DESCRIPTION, text)
        };
        let page = PAGE as u64;
        let aligned = self.start_phys.is_multiple_of(page) && self.length.is_multiple_of(page);
        if !aligned || !is_run(self.start_phys, self.length / page) || self.length > Self::LENGTH_MAX {
            return Err(damaged("cannot be as long as it says"));
        }
        match zstd::bulk::decompress(&self.packed, self.length as usize) {
            Ok(content) if content.len() as u64 == self.length => Ok(content),
            _ => Err(damaged("cannot be unpacked")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Vec<u8> {
        (0..3 * PAGE).map(|at| (at / 7) as u8).collect()
    }

    #[test]
    fn content_comes_back_through_a_description() {
        let memory = FirmwareMemory::new(0xE_0000, &tables()).expect("packed");
        let text = serde_json::to_string(&memory).expect("text");
        assert!(text.len() < PAGE, "it is compressed");
        let read: FirmwareMemory = serde_json::from_str(&text).expect("the same");
        assert_eq!((read.start_phys, read.length), (0xE_0000, 3 * PAGE as u64));
        assert_eq!(read.content().expect("unpacked"), tables());
    }

    #[test]
    fn false_lengths_are_refused() {
        let memory = FirmwareMemory::new(0xE_0000, &tables()).expect("packed");
        let page = PAGE as u64;
        for length in [0, 1, page, 2 * page, 4 * page, FirmwareMemory::LENGTH_MAX + page, u64::MAX - page + 1]
        {
            assert!(FirmwareMemory { length, ..memory.clone() }.content().is_err(), "{length:#x}");
        }
        for start_phys in [1, u64::MAX - page + 1] {
            let error = FirmwareMemory { start_phys, ..memory.clone() }.content().expect_err("an address");
            assert!(error.to_string().contains("record 0 at byte 20"), "{error}");
        }
        assert!(FirmwareMemory { packed: vec![7; 40], ..memory }.content().is_err());
    }
}
