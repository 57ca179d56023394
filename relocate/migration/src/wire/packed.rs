//! A packed record: the length before compression, and a zstd frame.

use std::io;

/// Returns the largest size on the wire of a record of at most `raw` bytes: its length stands
/// before it, and zstd adds little to bytes that it cannot compress.
pub const fn longest(raw: usize) -> usize {
    4 + raw + raw / 128 + 1024
}

/// Returns a record as it goes over the wire.
///
/// # Errors
/// zstd fails.
pub fn pack(raw: &[u8], level: i32) -> io::Result<Vec<u8>> {
    let mut packed = (raw.len() as u32).to_le_bytes().to_vec();
    packed.extend(zstd::bulk::compress(raw, level)?);
    Ok(packed)
}

/// Unpacks a record of at most `most` bytes; `longer` is the error for a longer one. The record may
/// be hostile.
///
/// # Errors
/// The reason why the bytes are no such record.
pub fn unpack(payload: &[u8], most: usize, longer: &'static str) -> Result<Vec<u8>, &'static str> {
    let (length, packed) = payload.split_first_chunk().ok_or("it is too short")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > most {
        return Err(longer);
    }
    let raw = zstd::bulk::decompress(packed, length).map_err(|_| "it cannot be decompressed")?;
    if raw.len() == length { Ok(raw) } else { Err("its length is not the one that it names") }
}
