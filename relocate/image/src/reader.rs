//! The reader of an image, which trusts nothing in it.

use std::io::{ErrorKind, Read};

use crate::{
    error::{Error, Place, Result},
    hashes::Hashes,
    machine::Machine,
    record::{Chunk, Commit, HEADER, Header, Identity, MAGIC, Part, RecordKind},
    restored::parse_version,
};

/// An image that is being read. Each chunk is checked by itself; only at the end is the image known
/// to be whole.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    identity: Option<Identity>,
    machine: Machine,
    place: Place,
    seen: Commit,
    checksums: blake3::Hasher,
    commit: Option<Commit>,
    was_restored: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the image's description of its machine.
    ///
    /// # Errors
    /// The file is no image, or a damaged one.
    pub fn open(from: R) -> Result<Self> {
        let (place, seen) = (Place { record: 0, offset: 0 }, Commit::default());
        let (machine, checksums) = (Machine::default(), blake3::Hasher::new());
        let (identity, commit) = (None, None);
        let mut reader =
            Self { from, identity, machine, place, seen, checksums, commit, was_restored: false };
        (reader.place.offset, reader.was_restored) = read_start(&mut reader.from)?;
        let (header, payload, place) = reader.record()?;
        if header.kind != RecordKind::Machine {
            return Err(Error::Damaged(place, "it is not the description of the machine".into()));
        }
        reader.machine = parse(&payload, place)?;
        reader.count(&header, place);
        Ok(reader)
    }

    /// Returns the image's description of its machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the image's identity.
    pub fn identity(&self) -> Identity {
        self.identity.unwrap_or_default()
    }

    /// Returns true if the machine has come back from the image.
    pub fn was_restored(&self) -> bool {
        self.was_restored
    }

    /// Returns the number of bytes read so far.
    pub fn offset(&self) -> u64 {
        self.place.offset
    }

    /// Returns the commit record after it has been reached.
    pub fn commit(&self) -> Option<&Commit> {
        self.commit.as_ref()
    }

    /// Returns the place of the next record.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// Returns the file that the image is read from.
    pub(crate) fn into_inner(self) -> R {
        self.from
    }

    /// Returns the next chunk, or `None` at the end of a complete image.
    ///
    /// # Errors
    /// The image is damaged, or ends here.
    pub fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        loop {
            match self.next_part()? {
                Some(Part::Frames(chunk)) => return Ok(Some(chunk)),
                Some(Part::Hashes(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// Returns the next part, or `None` at the end of a complete image.
    ///
    /// # Errors
    /// The image is damaged, or ends here.
    pub fn next_part(&mut self) -> Result<Option<Part>> {
        if self.commit.is_some() {
            return Ok(None);
        }
        let (header, payload, place) = self.record()?;
        match header.kind {
            RecordKind::Machine => {
                Err(Error::Damaged(place, "it is a second description of the machine".into()))
            }
            RecordKind::Frames => {
                let chunk = Chunk::expand(&payload, header.raw_length, place)?;
                let unchanged = chunk.unchanged();
                if unchanged > 0 && self.machine.parents.is_empty() {
                    return Err(Error::Damaged(place, "it leaves frames to a parent, and names none".into()));
                }
                self.seen.frames = self.seen.frames.saturating_add(chunk.pages());
                self.seen.unchanged = self.seen.unchanged.saturating_add(unchanged);
                self.count(&header, place);
                Ok(Some(Part::Frames(chunk)))
            }
            RecordKind::Hashes => {
                let hashes = Hashes::expand(&payload, header.raw_length, place)?;
                self.count(&header, place);
                Ok(Some(Part::Hashes(hashes)))
            }
            RecordKind::Commit => {
                self.finish(parse(&payload, place)?, place)?;
                Ok(None)
            }
        }
    }

    fn finish(&mut self, commit: Commit, place: Place) -> Result<()> {
        let damaged = |what: &str| Err(Error::Damaged(place, what.to_owned()));
        let counts = |commit: &Commit| (commit.records, commit.frames, commit.unchanged);
        if counts(&commit) != counts(&self.seen) {
            return damaged("its numbers of records are wrong");
        }
        if commit.checksum != self.checksums.finalize().to_string() {
            return damaged("the checksum over the whole image is wrong");
        }
        self.commit = Some(commit);
        Ok(())
    }

    fn count(&mut self, header: &Header, place: Place) {
        self.checksums.update(&header.checksum);
        self.seen.records = place.record + 1;
    }

    /// Returns the next record, whose checksum is right.
    fn record(&mut self) -> Result<(Header, Vec<u8>, Place)> {
        let place = self.place;
        let (header, payload) = read_record(&mut self.from, place, self.identity)?;
        self.identity = Some(header.identity);
        self.place = header.next(place);
        Ok((header, payload, place))
    }
}

/// Reads the start of an image. Returns its length in bytes, and true if the machine has come back from it.
pub fn read_start(from: &mut impl Read) -> Result<(u64, bool)> {
    let mut start = [0; MAGIC.len() + 4];
    match from.read_exact(&mut start) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(Error::NotAnImage),
        result => result?,
    }
    let (magic, version) = start.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(Error::NotAnImage);
    }
    let version = u32::from_le_bytes([version[0], version[1], version[2], version[3]]);
    let (_, was_restored) = parse_version(version).map_err(Error::Version)?;
    Ok((start.len() as u64, was_restored))
}

/// Reads a record's header. Refuses another identity than `identity`, if one is given.
pub fn read_header(from: &mut impl Read, place: Place, identity: Option<Identity>) -> Result<Header> {
    let mut bytes = [0; HEADER];
    match from.read_exact(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(Error::Torn(place)),
        result => result?,
    }
    let header = Header::parse(&bytes, place)?;
    if identity.is_some_and(|identity| identity != header.identity) {
        return Err(Error::Damaged(place, "it belongs to another image".into()));
    }
    Ok(header)
}

/// Reads the payload of a record whose header has been read. Checks the checksum.
pub fn read_payload(from: &mut impl Read, header: &Header, place: Place) -> Result<Vec<u8>> {
    // A false length must not cost memory: no memory is reserved for bytes that do not arrive.
    let mut payload = Vec::new();
    let read = from.take(header.length).read_to_end(&mut payload)?;
    if read as u64 != header.length {
        return Err(Error::Torn(place));
    }
    if header.checksum_with(&payload) != header.checksum {
        return Err(Error::Damaged(place, "its checksum is wrong".into()));
    }
    Ok(payload)
}

/// Reads a record, and checks its checksum.
pub fn read_record(
    from: &mut impl Read,
    place: Place,
    identity: Option<Identity>,
) -> Result<(Header, Vec<u8>)> {
    let header = read_header(from, place, identity)?;
    let payload = read_payload(from, &header, place)?;
    Ok((header, payload))
}

pub fn parse<T: serde::de::DeserializeOwned>(text: &[u8], place: Place) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|error| Error::Damaged(place, format!("it cannot be read ({error})")))
}

/// Reads an image to its end. Calls `progress` after each record with the number of bytes read.
///
/// # Errors
/// The image is incomplete or damaged.
pub fn verify(from: impl Read, mut progress: impl FnMut(u64)) -> Result<(Machine, Identity, Commit)> {
    let mut reader = Reader::open(from)?;
    while reader.next_chunk()?.is_some() {
        progress(reader.offset());
    }
    let identity = reader.identity();
    let Reader { machine, commit, .. } = reader;
    Ok((machine, identity, commit.unwrap_or_default()))
}
