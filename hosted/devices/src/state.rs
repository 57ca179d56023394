//! The state of devices as bytes: numbers of eight bytes, little-endian, and strings of bytes with their
//! length before them. What the bytes mean follows from their order, which a version stands for.

use crate::error::{Error, Result};

/// Bytes that are being written.
#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn number(&mut self, number: impl Into<u64>) {
        self.0.extend(number.into().to_le_bytes());
    }

    pub fn numbers(&mut self, numbers: impl IntoIterator<Item = impl Into<u64>>) {
        numbers.into_iter().for_each(|number| self.number(number));
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Bytes that are being read.
#[derive(Debug)]
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Reads a number.
    ///
    /// # Errors
    /// If the bytes end before, or the number is too large.
    pub fn number<T: TryFrom<u64>>(&mut self) -> Result<T> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(wrong)?;
        self.0 = rest;
        T::try_from(u64::from_le_bytes(*number)).map_err(|_| wrong())
    }

    /// Reads a number that is 0 or 1.
    ///
    /// # Errors
    /// If it is another one.
    pub fn truth(&mut self) -> Result<bool> {
        match self.number::<u64>()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(wrong()),
        }
    }

    /// Reads a string of bytes.
    ///
    /// # Errors
    /// If the bytes end before.
    pub fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.number::<usize>()?;
        let (bytes, rest) = self.0.split_at_checked(length).ok_or_else(wrong)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// If something is.
    pub fn finish(self) -> Result<()> {
        if self.0.is_empty() { Ok(()) } else { Err(wrong()) }
    }
}

fn wrong() -> Error {
    Error::state("the machine")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let mut writer = Writer::default();
        writer.numbers([1_u8, 0]);
        writer.bytes(b"text");
        writer.number(300_u32);
        let bytes = writer.finish();
        let mut reader = Reader::new(&bytes);
        assert!(reader.truth().unwrap() && !reader.truth().unwrap());
        assert_eq!(reader.bytes().unwrap(), b"text");
        assert!(Reader::new(reader.0).number::<u8>().is_err() && Reader::new(reader.0).truth().is_err());
        assert_eq!(reader.number::<u16>().unwrap(), 300);
        assert!(reader.number::<u64>().is_err());
        reader.finish().unwrap();
        assert!(Reader::new(&bytes).finish().is_err());
        assert!(Reader::new(&u64::MAX.to_le_bytes()).bytes().is_err());
    }
}
