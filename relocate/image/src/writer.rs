//! The writer of an image, from its first byte to its last.

use std::io::Write;

use crate::{
    error::Result,
    machine::Machine,
    record::{Commit, Compressed, Header, Identity, MAGIC, RecordKind, VERSION},
};

/// An image that is being written. Without [`Writer::commit`] no reader accepts it.
#[derive(Debug)]
pub struct Writer<W> {
    to: W,
    identity: Identity,
    commit: Commit,
    checksums: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Writer<W> {
    /// Begins an image with the description of its machine.
    ///
    /// # Errors
    /// Writing fails.
    pub fn begin(to: W, identity: Identity, machine: &Machine) -> Result<Self> {
        let (commit, checksums) = (Commit::default(), blake3::Hasher::new());
        let mut writer = Self { to, identity, commit, checksums, bytes: 0 };
        writer.put(&MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        let text = serde_json::to_vec(machine).map_err(std::io::Error::from)?;
        writer.record(RecordKind::Machine, &text, text.len() as u64)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        Ok(self.to.write_all(bytes)?)
    }

    fn record(&mut self, kind: RecordKind, payload: &[u8], raw_length: u64) -> Result<()> {
        let header = Header::new(kind, self.commit.records, self.identity, payload, raw_length);
        self.put(&header.bytes())?;
        self.put(payload)?;
        self.checksums.update(&header.checksum);
        self.commit.records += 1;
        Ok(())
    }

    /// Adds frames, or hashes of frames.
    ///
    /// # Errors
    /// Writing fails.
    pub fn add(&mut self, part: &Compressed) -> Result<()> {
        self.record(part.kind, &part.payload, part.raw_length)?;
        self.commit.frames += part.frames;
        self.commit.zeros += part.zeros;
        self.commit.duplicates += part.duplicates;
        self.commit.unchanged += part.unchanged;
        Ok(())
    }

    /// Returns the number of bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ends the image. It is valid as soon as the underlying file is safe on its medium. Returns
    /// the image's length in bytes too.
    ///
    /// # Errors
    /// Writing fails.
    pub fn commit(mut self) -> Result<(Commit, u64)> {
        let commit = Commit { checksum: self.checksums.finalize().to_string(), ..self.commit.clone() };
        let text = serde_json::to_vec(&commit).map_err(std::io::Error::from)?;
        self.record(RecordKind::Commit, &text, text.len() as u64)?;
        self.to.flush()?;
        Ok((commit, self.bytes))
    }
}
