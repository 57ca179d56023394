//! An image on which the next one is made: its hashes, without the frames between them.

use std::io::{ErrorKind, Read, Seek};

use crate::{
    chain::hashes_at,
    error::{Error, Place, Result},
    hashes::{Hash, Key, order},
    machine::Machine,
    reader::{parse, read_header, read_payload, read_record, read_start},
    record::{Commit, Identity, RecordKind},
};

/// The parent of the next image. Its frames are not checked here: [`crate::Chain`] checks them when
/// it merges.
#[derive(Debug)]
pub struct Parent<R> {
    from: R,
    identity: Identity,
    machine: Machine,
    key: Key,
    /// Places of the hashes that are not read yet, in reverse: the next one is last.
    places: Vec<Place>,
    /// Hashes that were read and not asked for, in reverse.
    hashes: Vec<(u64, Hash)>,
}

impl<R: Read + Seek> Parent<R> {
    /// Scans an image to its end.
    ///
    /// # Errors
    /// The file is no image, was never finished, has no hashes, or its hashes are damaged.
    pub fn open(mut from: R) -> Result<Self> {
        let place = Place { record: 0, offset: read_start(&mut from)?.0 };
        let (header, payload) = read_record(&mut from, place, None)?;
        if header.kind != RecordKind::Machine {
            return Err(Error::Damaged(place, "it is not the description of the machine".into()));
        }
        let mut checksums = blake3::Hasher::new();
        checksums.update(&header.checksum);
        let machine: Machine = parse(&payload, place)?;
        let identity = header.identity;
        let key = Key::default();
        let mut parent = Self { from, identity, machine, key, places: Vec::new(), hashes: Vec::new() };
        parent.outline(header.next(place), checksums)?;
        let Some(first) = parent.places.last() else {
            return Err(Error::Unfit("it has no hashes of its frames, so no image can be made on it".into()));
        };
        parent.key = hashes_at(&mut parent.from, *first, identity)?.key;
        Ok(parent)
    }

    /// Finds the records of hashes, and the end.
    fn outline(&mut self, mut place: Place, mut checksums: blake3::Hasher) -> Result<()> {
        let commit: Commit = loop {
            let header = read_header(&mut self.from, place, Some(self.identity))?;
            match header.kind {
                RecordKind::Frames => self.skip(header.length, place)?,
                RecordKind::Hashes => {
                    read_payload(&mut self.from, &header, place)?;
                    self.places.push(place);
                }
                RecordKind::Commit => break parse(&read_payload(&mut self.from, &header, place)?, place)?,
                RecordKind::Machine => {
                    return Err(Error::Damaged(place, "it is a second description of the machine".into()));
                }
            }
            checksums.update(&header.checksum);
            place = header.next(place);
        };
        if commit.records != place.record || commit.checksum != checksums.finalize().to_string() {
            return Err(Error::Damaged(place, "the checksum over the whole image is wrong".into()));
        }
        self.places.reverse();
        Ok(())
    }

    fn skip(&mut self, length: u64, place: Place) -> Result<()> {
        let length = i64::try_from(length).map_err(|_| Error::Torn(place))?;
        match self.from.seek_relative(length) {
            Err(error) if error.kind() == ErrorKind::InvalidInput => Err(Error::Torn(place)),
            result => Ok(result?),
        }
    }

    /// Returns the image's identity.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Returns the image's description of its machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the key of the image's hashes.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Returns the images that a child of this one needs: its own parents, then the image itself.
    #[must_use]
    pub fn lineage(&self) -> Vec<Identity> {
        let mut line = self.machine.parents.clone();
        line.push(self.identity);
        line
    }

    /// Returns a frame's hash, if the image has that frame. The caller asks in [`order`].
    ///
    /// # Errors
    /// The image can no longer be read.
    pub fn hash_of(&mut self, phys: u64) -> Result<Option<Hash>> {
        loop {
            while let Some((frame, hash)) = self.hashes.pop_if(|(frame, _)| order(*frame) <= order(phys)) {
                if frame == phys {
                    return Ok(Some(hash));
                }
            }
            if !self.hashes.is_empty() {
                return Ok(None);
            }
            let Some(place) = self.places.pop() else { return Ok(None) };
            let hashes = hashes_at(&mut self.from, place, self.identity)?;
            // Hashes with another key cannot be compared.
            if hashes.key == self.key {
                self.hashes = hashes.iter().collect();
                self.hashes.reverse();
            }
        }
    }
}
