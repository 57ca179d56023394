//! The bytes of a record as they go over the wire: how many they are, and a zstd frame of them.

use std::io;

/// What a record of at most so many bytes has on the wire at most: its length is before it, and zstd adds little to what it cannot
/// compress.
pub const fn longest(raw: usize) -> usize {
    4 + raw + raw / 128 + 1024
}

/// A record as it goes over the wire.
///
/// # Errors
/// If zstd fails.
pub fn pack(raw: &[u8], level: i32) -> io::Result<Vec<u8>> {
    let mut packed = (raw.len() as u32).to_le_bytes().to_vec();
    packed.extend(zstd::bulk::compress(raw, level)?);
    Ok(packed)
}

/// The record that came, of at most so many bytes; `longer` is what is said of one that has more. It may have been made with ill will.
///
/// # Errors
/// Why it is none.
pub fn unpack(payload: &[u8], most: usize, longer: &'static str) -> Result<Vec<u8>, &'static str> {
    let (length, packed) = payload.split_first_chunk().ok_or("it is too short")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > most {
        return Err(longer);
    }
    let raw = zstd::bulk::decompress(packed, length).map_err(|_| "it cannot be decompressed")?;
    if raw.len() == length { Ok(raw) } else { Err("it has another length than it says") }
}
