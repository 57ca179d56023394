//! Long texts of messages: the description of a machine.

use std::io;

/// Largest size of a text in bytes, unpacked.
const UNPACKED_MAX: usize = 32 << 20;

/// Returns a text as it goes with a message.
///
/// # Errors
/// The text is too long, or zstd fails.
pub fn pack_text(text: &[u8]) -> io::Result<Vec<u8>> {
    if text.len() > UNPACKED_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the text is too long"));
    }
    zstd::bulk::compress(text, 3)
}

/// Returns the text that was packed; the packed bytes may be hostile.
///
/// # Errors
/// The bytes are no packed text.
pub fn unpack_text(packed: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::decompress(packed, UNPACKED_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back() {
        let text = "{\"ranges\": []}".repeat(10_000);
        let packed = pack_text(text.as_bytes()).expect("packed");
        assert!(packed.len() < text.len() / 10);
        assert_eq!(unpack_text(&packed).expect("unpacked"), text.as_bytes());
        assert!(unpack_text(&packed[1..]).is_err());
        assert!(pack_text(&vec![0; UNPACKED_MAX + 1]).is_err());
    }
}
