//! The note in an image that its machine has come back from it. A machine that comes back a second time
//! begins again with keys and counters that its first return has used.
//!
//! The note is in the version, which no checksum covers: [`RESTORED`] is added to it. No change of one bit
//! turns a version into one with the note, or back.

use crate::record::{HEADER, Identity, MAGIC, VERSION, VERSION_OLDEST};

/// Added to the version of an image whose machine has come back.
pub(crate) const RESTORED: u32 = 0x5EED_0000;

/// Offset of the version.
const VERSION_AT: usize = MAGIC.len();
/// Offset of the image's identity, in the header of record 0.
const IDENTITY_AT: usize = VERSION_AT + 4 + 16;
/// Length of the beginning that is needed here.
pub const START: usize = VERSION_AT + 4 + HEADER;

/// The beginning of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The image's identity. No checksum has been compared.
    pub identity: Identity,
    /// True if the machine has come back from the image.
    pub was_restored: bool,
}

impl Start {
    /// Reads the first [`START`] bytes of an image; `None` if they are of no image.
    #[must_use]
    pub fn read(first: &[u8]) -> Option<Self> {
        let first = first.get(..START).filter(|first| first.starts_with(&MAGIC))?;
        let word = first[VERSION_AT..VERSION_AT + 4].try_into().ok()?;
        let (_, was_restored) = parse_version(u32::from_le_bytes(word)).ok()?;
        let identity = Identity(first[IDENTITY_AT..IDENTITY_AT + 16].try_into().ok()?);
        Some(Self { identity, was_restored })
    }

    /// Adds the note to the beginning of an image that does not have it.
    pub fn note_restored(first: &mut [u8]) {
        if Self::read(first).is_none_or(|start| start.was_restored) {
            return;
        }
        let field = &mut first[VERSION_AT..VERSION_AT + 4];
        // The versions are small: the low half stays.
        field[2..].copy_from_slice(&RESTORED.to_le_bytes()[2..]);
    }
}

/// Splits the version from the note.
///
/// # Errors
/// The version is none that is known.
pub(crate) fn parse_version(word: u32) -> Result<(u32, bool), u32> {
    let known = |version| (VERSION_OLDEST..=VERSION).contains(&version);
    match word.wrapping_sub(RESTORED) {
        version if known(version) => Ok((version, true)),
        _ if known(word) => Ok((word, false)),
        _ => Err(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Reader, Writer, verify};

    fn image() -> Vec<u8> {
        let mut bytes = Vec::new();
        let writer = Writer::begin(&mut bytes, Identity([7; 16]), &Machine::default()).expect("begun");
        writer.commit().expect("committed");
        bytes
    }

    #[test]
    fn a_return_is_noted_once() {
        let mut bytes = image();
        let start = Start { identity: Identity([7; 16]), was_restored: false };
        assert_eq!(Start::read(&bytes), Some(start));
        assert!(!Reader::open(&bytes[..]).expect("opened").was_restored());
        for _ in 0..2 {
            Start::note_restored(&mut bytes);
            assert_eq!(Start::read(&bytes), Some(Start { was_restored: true, ..start }));
        }
        assert!(Reader::open(&bytes[..]).expect("opened").was_restored());
        verify(&bytes[..], |_| {}).expect("the image is whole all the same");
    }

    #[test]
    fn each_version_keeps_its_number() {
        for version in VERSION_OLDEST..=VERSION {
            assert_eq!(parse_version(version), Ok((version, false)));
            assert_eq!(parse_version(RESTORED | version), Ok((version, true)));
            for bit in 0..32 {
                let flipped = parse_version(version ^ 1 << bit);
                assert!(flipped.is_err() || flipped.is_ok_and(|(_, restored)| !restored), "{bit}");
                let flipped = parse_version((RESTORED | version) ^ 1 << bit);
                assert!(flipped.is_err() || flipped.is_ok_and(|(_, restored)| restored), "{bit}");
            }
        }
        assert_eq!(parse_version(0), Err(0));
        assert_eq!(parse_version(RESTORED), Err(RESTORED));
    }

    #[test]
    fn what_is_no_image_is_left_alone() {
        let whole = image();
        for mut bytes in [whole[..START - 1].to_vec(), vec![0; 4096], Vec::new()] {
            let before = bytes.clone();
            Start::note_restored(&mut bytes);
            assert_eq!((Start::read(&bytes), bytes), (None, before));
        }
    }
}
