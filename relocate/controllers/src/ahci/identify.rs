//! The answer of a disk to IDENTIFY DEVICE: the one of the machine's own disk, without what this one cannot
//! do.

/// Size of the answer.
pub const STRUCTURE: usize = 512;
/// Words of the answer.
mod word {
    pub const KIND: usize = 0;
    pub const SERIAL: usize = 10;
    pub const MODEL: usize = 27;
    pub const CAPABILITIES: usize = 49;
    pub const SECTORS: usize = 60;
    pub const ADDITIONAL: usize = 69;
    pub const SATA: usize = 76;
    pub const SETS: usize = 83;
    pub const ENABLED: usize = 85;
    pub const SECTORS_48: usize = 100;
    pub const TRIM_BLOCKS: usize = 105;
    pub const SIZES: usize = 106;
    pub const SECTOR_SIZE: usize = 117;
    pub const TRIM: usize = 169;
    pub const CHECK: usize = 255;
}
/// Bit of word 0: it is no ATA disk.
const IS_OTHER: u16 = 0x8000;
/// Bit of word 49: sectors have numbers.
const HAS_NUMBERS: u16 = 1 << 9;
/// Bit of word 83: sectors have 48 bits.
const HAS_48_BITS: u16 = 1 << 10;
/// Bit of word 85: the write cache is on.
const CACHES: u16 = 1 << 5;
/// Bits of word 69: what is trimmed reads as zeros, and the same at each time.
const ZEROS: u16 = 1 << 5 | 1 << 14;
/// The words with what a disk can do, and the bits that stay. The others are SMART, security, a
/// host-protected area, commands by DMA for logs, and the like.
const KEPT: [(usize, u16); 26] = [
    (47, 0),
    (48, 0),
    (59, 0),
    (word::ADDITIONAL, ZEROS),
    // Speeds, queued commands, and power management that the host begins.
    (word::SATA, 0x030E),
    (77, 0x000E),
    (78, 0x004C),
    (79, 0x004C),
    // Power management, write cache, read-ahead.
    (82, 0x0068),
    // 48 bits, and flushes.
    (word::SETS, 0x7400),
    // Names, forced writes, logs.
    (84, 0x4160),
    (word::ENABLED, 0x0068),
    (86, 0xB400),
    (87, 0x4160),
    (89, 0),
    (90, 0),
    (91, 0),
    (92, 0),
    (94, 0),
    (119, 0x4000),
    (120, 0x4000),
    (127, 0),
    (128, 0),
    (word::TRIM, 1),
    (206, 0),
    (243, 0),
];
/// Largest number of blocks of ranges that one command trims.
const TRIM_BLOCKS_MAX: u16 = 64;

/// What a disk says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    words: Vec<u16>,
    /// Sectors of the disk.
    pub sectors: u64,
    /// Size of a sector, as a power of two.
    pub shift: u32,
}

impl Identity {
    /// Takes the answer of the machine's own disk.
    ///
    /// # Errors
    /// Returns the reason as a clause if a guest cannot have the disk.
    pub fn new(answer: &[u8]) -> Result<Self, String> {
        if answer.len() != STRUCTURE {
            return Err(format!("{} bytes of what it says of itself are known", answer.len()));
        }
        let mut words: Vec<u16> =
            answer.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
        if words[word::KIND] & IS_OTHER != 0 || words[word::CAPABILITIES] & HAS_NUMBERS == 0 {
            return Err("it is no disk whose sectors have numbers".into());
        }
        let sectors = sectors(&words);
        let bytes = sector_size(&words);
        if sectors == 0 || !bytes.is_power_of_two() || !(512..=65_536).contains(&bytes) {
            return Err(format!("it has {sectors} sectors of {bytes} bytes"));
        }
        for (word, bits) in KEPT {
            words[word] &= bits;
        }
        if words[word::TRIM] == 0 {
            words[word::ADDITIONAL] = 0;
        }
        words[word::TRIM_BLOCKS] = words[word::TRIM_BLOCKS].clamp(1, TRIM_BLOCKS_MAX);
        Ok(Self { words, sectors, shift: bytes.trailing_zeros() })
    }

    /// Returns the size of the disk in bytes, if there is such a number.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.sectors.checked_mul(1 << self.shift)
    }

    /// Returns the answer. Its last word has a checksum if the machine's own had one.
    #[must_use]
    pub fn answer(&self, caches: bool) -> Vec<u8> {
        let mut words = self.words.clone();
        words[word::ENABLED] = words[word::ENABLED] & !CACHES | if caches { CACHES } else { 0 };
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if words[word::CHECK] & 0xFF == 0xA5 {
            bytes[STRUCTURE - 1] = checksum(&bytes[..STRUCTURE - 1]);
        }
        bytes
    }

    /// Returns true if a write may end before its data lasts, as the machine had set the disk.
    #[must_use]
    pub fn caches(&self) -> bool {
        self.words[word::ENABLED] & CACHES != 0
    }

    /// Returns the largest number of blocks of ranges that a command trims. Zero: the disk has no such
    /// command.
    #[must_use]
    pub fn trim_blocks(&self) -> u16 {
        if self.words[word::TRIM] & 1 == 0 { 0 } else { self.words[word::TRIM_BLOCKS] }
    }

    /// Returns true if the disk has promised that what is trimmed reads as zeros.
    #[must_use]
    pub fn trims_to_zeros(&self) -> bool {
        self.words[word::ADDITIONAL] & 1 << 5 != 0
    }

    /// Returns the number of the fastest generation of links that the disk has.
    #[must_use]
    pub fn speed(&self) -> u32 {
        (1..=3).rev().find(|speed| self.words[word::SATA] & 1 << speed != 0).unwrap_or(1)
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> String {
        self.text(word::MODEL, 20)
    }

    /// Returns the serial number.
    #[must_use]
    pub fn serial(&self) -> String {
        self.text(word::SERIAL, 10)
    }

    /// Returns a text, of which each word has its first byte above the second.
    fn text(&self, start: usize, count: usize) -> String {
        let bytes: Vec<u8> =
            self.words[start..start + count].iter().flat_map(|word| word.to_be_bytes()).collect();
        let shown = bytes.iter().filter(|byte| byte.is_ascii_graphic() || **byte == b' ');
        shown.map(|byte| char::from(*byte)).collect::<String>().trim().to_owned()
    }
}

/// Returns the byte that makes the sum of all bytes zero.
pub fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

fn sectors(words: &[u16]) -> u64 {
    let number = |start: usize, count: usize| {
        words[start..start + count].iter().rev().fold(0, |number, word| number << 16 | u64::from(*word))
    };
    match words[word::SETS] & HAS_48_BITS {
        0 => number(word::SECTORS, 2),
        _ => number(word::SECTORS_48, 4),
    }
}

fn sector_size(words: &[u16]) -> u64 {
    let is_valid = words[word::SIZES] & 0xC000 == 0x4000;
    if !is_valid || words[word::SIZES] & 1 << 12 == 0 {
        return 512;
    }
    let low = u64::from(words[word::SECTOR_SIZE]);
    (u64::from(words[word::SECTOR_SIZE + 1]) << 16 | low) * 2
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests {
    use super::*;

    /// Returns the answer of a disk that can do a lot, with so many sectors of 512 bytes.
    pub fn answer(sectors: u64) -> Vec<u8> {
        let mut words = vec![0xFFFF_u16; 256];
        words[0] = 0x0040;
        for (at, text) in [(10, "SERIAL  "), (27, "A MODEL ")] {
            words[at..at + if at == 10 { 10 } else { 20 }].fill(0x2020);
            for (word, pair) in words[at..].iter_mut().zip(text.as_bytes().chunks(2)) {
                *word = u16::from_be_bytes([pair[0], pair[1]]);
            }
        }
        words[76] = 0x850E;
        words[77] = 0x0046;
        words[83] = 0x7FFF;
        words[100..104].copy_from_slice(&[sectors as u16, (sectors >> 16) as u16, 0, 0]);
        words[105] = 8;
        words[106] = 0x6003;
        words[255] = 0x00A5;
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn changed(changes: &[(usize, u16)]) -> Result<Identity, String> {
        let mut answer = answer(100);
        for (word, value) in changes {
            answer[2 * word..2 * word + 2].copy_from_slice(&value.to_le_bytes());
        }
        Identity::new(&answer)
    }

    #[test]
    fn a_disk_keeps_its_identity_and_loses_what_cannot_be_done_here() {
        let identity = Identity::new(&answer(0x12_3456)).unwrap();
        assert_eq!((identity.model().as_str(), identity.serial().as_str()), ("A MODEL", "SERIAL"));
        assert_eq!((identity.sectors, identity.shift, identity.speed()), (0x12_3456, 9, 3));
        assert!(identity.caches() && identity.trims_to_zeros());
        assert_eq!(identity.trim_blocks(), 8);
        let answer = identity.answer(false);
        let word = |at: usize| u16::from_le_bytes([answer[2 * at], answer[2 * at + 1]]);
        assert_eq!(answer[20..40], self::answer(1)[20..40], "the serial number");
        assert_eq!([82, 83, 85, 87].map(word), [0x0068, 0x7400, 0x0048, 0x4160]);
        assert_eq!([76, 119, 128, 206].map(word), [0x010E, 0x4000, 0, 0]);
        assert_eq!(answer.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_ne!(identity.answer(true)[170], answer[170]);
    }

    #[test]
    fn sectors_are_counted_as_the_disk_says() {
        let small = changed(&[(83, 0x4000), (60, 7), (61, 1)]).unwrap();
        assert_eq!((small.sectors, small.bytes()), (0x1_0007, Some(0x200_0E00)));
        let native = changed(&[(106, 0x5000), (117, 2048), (118, 0)]).unwrap();
        assert_eq!((native.shift, native.bytes()), (12, Some(409_600)));
        assert_eq!(changed(&[(103, 0xFFFF)]).unwrap().bytes(), None);
        assert_eq!(changed(&[(169, 0), (76, 0)]).map(|one| (one.trim_blocks(), one.speed())), Ok((0, 1)));
    }

    #[test]
    fn what_is_no_disk_for_a_guest_is_refused() {
        assert!(Identity::new(&[0; 60]).unwrap_err().contains("60 bytes"));
        assert!(changed(&[(0, 0x8580)]).unwrap_err().contains("no disk"));
        assert!(changed(&[(49, 0)]).unwrap_err().contains("no disk"));
        assert!(changed(&[(100, 0)]).unwrap_err().contains("0 sectors"));
        assert!(changed(&[(106, 0x5000), (117, 3), (118, 0)]).unwrap_err().contains("of 6 bytes"));
    }
}
