//! The small language of inputs that have checksums: a list of records.
//!
//! A record is its kind (1 byte), flags (1), the length of its payload (2, little-endian), and the
//! payload. An input that ends within a record gives a shorter payload.

use std::hash::{DefaultHasher, Hasher};

/// Flag: the payload is compressed before it goes into the record.
pub const COMPRESSED: u8 = 1;
/// Flag: the number of the record is wrong.
pub const OUT_OF_ORDER: u8 = 2;
/// Flag: the checksum of the record is wrong.
pub const WRONG_SUM: u8 = 4;

#[derive(Clone, Debug)]
pub struct Record {
    pub kind: u8,
    pub flags: u8,
    pub payload: Vec<u8>,
}

impl Record {
    #[must_use]
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Reads the records of an input.
#[must_use]
pub fn records(mut input: &[u8]) -> Vec<Record> {
    let mut found = Vec::new();
    while let Some((head, rest)) = input.split_first_chunk::<4>() {
        let length = usize::from(u16::from_le_bytes([head[2], head[3]])).min(rest.len());
        let (payload, behind) = rest.split_at(length);
        found.push(Record { kind: head[0], flags: head[1], payload: payload.to_vec() });
        input = behind;
    }
    found
}

/// Writes a record, for seeds.
///
/// # Panics
///
/// The payload is longer than 64 KiB.
#[must_use]
pub fn record(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).expect("a short payload").to_le_bytes();
    [&[kind, flags], &length[..], payload].concat()
}

/// Returns a number for an outcome: its text without digits, so that places do not count.
#[must_use]
pub fn outcome(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.bytes().filter(|byte| !byte.is_ascii_hexdigit()).for_each(|byte| hasher.write_u8(byte));
    hasher.finish()
}
