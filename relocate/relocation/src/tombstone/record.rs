//! The record of a tombstone: the same bytes in a variable of the firmware and in a block of a disk.
//!
//! ```text
//! 0    16   "MERCURY-MOVED-1" and two NULs
//! 16   4    length of the text, little-endian
//! 20   n    the text: JSON
//! 20+n      zeros
//! 480  32   BLAKE3 of all bytes before
//! ```

use super::when;
use mercury_migration::protocol::{Attempt, Tombstone};
use serde::{Deserialize, Serialize};

/// Size of a record: a disk writes so many bytes as a whole.
pub const LENGTH: usize = 512;
const MAGIC: &[u8; 16] = b"MERCURY-MOVED-1\0";
const TEXT: usize = 20;
const HASH: usize = 480;

/// The state of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The destination may run the machine.
    Committed,
    /// The machine runs at the destination, for good.
    Moved,
    /// The machine may start here.
    Cleared,
}

impl From<Tombstone> for State {
    fn from(tombstone: Tombstone) -> Self {
        match tombstone {
            Tombstone::Committed => Self::Committed,
            Tombstone::GivenUp => Self::Moved,
            Tombstone::Cleared => Self::Cleared,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub state: State,
    pub attempt: String,
    /// The machine that it moved to.
    pub to: String,
    /// Hash of the identity of the system that has moved, if it has one.
    pub system: Option<String>,
    /// Time in seconds since 1970.
    pub at: u64,
    /// Number of the record: of two copies the one with the higher number counts.
    pub number: u64,
    /// True if disks went with the system, so that the disks here are older. Records of versions before do
    /// not say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disks_went: bool,
}

impl Record {
    /// Makes the first record of an attempt.
    #[must_use]
    pub fn new(attempt: Attempt, to: &str, system: Option<String>) -> Self {
        // The name of a host may be longer than the room for it.
        let to = to.chars().take(64).collect();
        let attempt = attempt.to_string();
        Self { state: State::Cleared, attempt, to, system, at: 0, number: 0, disks_went: false }
    }

    /// Returns true if the machine may run elsewhere.
    #[must_use]
    pub fn forbids(&self) -> bool {
        self.state != State::Cleared
    }

    /// Returns the time of writing as text.
    #[must_use]
    pub fn when(&self) -> String {
        when::utc(self.at)
    }

    /// Encodes the record for its place.
    ///
    /// # Errors
    ///
    /// Returns an error if it is too long.
    pub fn pack(&self) -> Result<[u8; LENGTH], String> {
        let text = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        let mut bytes = [0; LENGTH];
        bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        bytes[MAGIC.len()..TEXT].copy_from_slice(&(text.len() as u32).to_le_bytes());
        bytes[TEXT..HASH].get_mut(..text.len()).ok_or("the tombstone is too long")?.copy_from_slice(&text);
        let hash = blake3::hash(&bytes[..HASH]);
        bytes[HASH..].copy_from_slice(hash.as_bytes());
        Ok(bytes)
    }

    /// Decodes a record; returns `None` if the bytes never were one.
    ///
    /// # Errors
    ///
    /// Returns the reason if the record is damaged or of another version.
    pub fn unpack(bytes: &[u8]) -> Result<Option<Self>, String> {
        if !bytes.starts_with(MAGIC) {
            return Ok(None);
        }
        let bytes: &[u8; LENGTH] = bytes.try_into().map_err(|_| "the tombstone has another length")?;
        if blake3::hash(&bytes[..HASH]).as_bytes() != &bytes[HASH..] {
            return Err("the tombstone is damaged".into());
        }
        let length = u32::from_le_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]) as usize;
        let text = bytes[TEXT..HASH].get(..length).ok_or("the tombstone's length is wrong")?;
        serde_json::from_slice(text)
            .map(Some)
            .map_err(|error| format!("the tombstone is of another version: {error}"))
    }
}

/// Returns the copy that counts. One copy alone may be damaged, because the power failed while it
/// was written. Then the other one holds, because no message depended on the new one yet.
///
/// # Errors
///
/// Returns the reason if the contents cannot be read.
pub fn newest(copies: &[Result<Option<Record>, String>]) -> Result<Option<Record>, String> {
    let whole = copies.iter().filter_map(|copy| copy.as_ref().ok()?.as_ref());
    if let Some(newest) = whole.max_by_key(|record| record.number) {
        return Ok(Some(newest.clone()));
    }
    match copies.iter().find_map(|copy| copy.as_ref().err()) {
        Some(error) => Err(error.clone()),
        None => Ok(None),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Makes a tombstone with this number.
    pub fn record(state: State, number: u64) -> Record {
        let first = Record::new(Attempt([7; 16]), "10.9.0.3:4747", Some("ab".repeat(16)));
        Record { state, at: 1_795_568_400, number, ..first }
    }

    #[test]
    fn a_packed_record_is_unpacked() {
        for state in [State::Committed, State::Moved, State::Cleared] {
            let record = record(state, u64::MAX);
            let bytes = record.pack().expect("it fits");
            assert_eq!(Record::unpack(&bytes), Ok(Some(record)));
        }
        let long = Record::new(Attempt([255; 16]), &"ä".repeat(300), Some("f".repeat(32)));
        let long = Record { at: u64::MAX, number: u64::MAX, disks_went: true, ..long };
        assert_eq!(Record::unpack(&long.pack().expect("the longest fits")), Ok(Some(long)));
    }

    #[test]
    fn records_of_versions_before_say_nothing_of_disks() {
        let text = r#"{"state":"moved","attempt":"07","to":"b","system":null,"at":1,"number":2}"#;
        let old: Record = serde_json::from_str(text).expect("a record");
        assert!(!old.disks_went);
        assert_eq!(serde_json::to_string(&old).expect("JSON"), text, "versions before read it, too");
    }

    #[test]
    fn blocks_without_the_magic_hold_no_tombstone() {
        for bytes in [&[][..], &[0; LENGTH], &[0xFF; LENGTH], b"MERCURY-MOVED-2"] {
            assert_eq!(Record::unpack(bytes), Ok(None));
        }
        assert!(Record::unpack(b"MERCURY-MOVED-1\0").is_err());
    }

    proptest! {
        /// Every turned bit is noticed.
        #[test]
        fn damage_is_noticed(at in MAGIC.len()..LENGTH, bit in 0..8_u8) {
            let mut bytes = record(State::Committed, 3).pack().expect("it fits");
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(Record::unpack(&bytes).is_err());
        }

        #[test]
        fn anything_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Record::unpack(&bytes);
            let mut marked = MAGIC.to_vec();
            marked.extend(bytes);
            prop_assert!(Record::unpack(&marked).is_err());
        }
    }

    #[test]
    fn a_copy_that_was_being_written_does_not_count() {
        let (old, new) = (record(State::Cleared, 4), record(State::Committed, 5));
        let damaged = || Err("the tombstone is damaged".to_owned());
        let found = |copies: [Result<Option<Record>, String>; 2]| newest(&copies);
        assert_eq!(found([Ok(Some(new.clone())), Ok(Some(old.clone()))]), Ok(Some(new.clone())));
        assert_eq!(found([Ok(Some(old.clone())), Ok(Some(new.clone()))]), Ok(Some(new.clone())));
        assert_eq!(found([damaged(), Ok(Some(old.clone()))]), Ok(Some(old)));
        assert_eq!(found([Ok(Some(new.clone())), damaged()]), Ok(Some(new)));
        assert!(found([damaged(), Ok(None)]).is_err());
        assert!(found([damaged(), damaged()]).is_err());
        assert_eq!(found([Ok(None), Ok(None)]), Ok(None));
    }
}
