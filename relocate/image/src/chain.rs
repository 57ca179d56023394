//! The merge of images that are made on each other.
//!
//! [`Chain`] first reads every image to its end and checks it, the full one before those made on
//! it. For each frame of the last image it keeps eight bytes: the image, the record and the page
//! that hold the content. [`Merged`] then fetches the frames in the last image's order. Each frame
//! must have the hash that the last image states, so that wrongly merged memory cannot come out.

use std::io::{Read, Seek, SeekFrom};

use crate::{
    error::{Error, Place, Result},
    hashes::{Hash, Hashes, Key, Run, order},
    machine::{Kind, Machine},
    reader::{Reader, read_record},
    record::{Chunk, Commit, Frame, Identity, PAGE, Part, RecordKind, Source, is_run},
};

/// Largest number of parents of an image.
pub const PARENTS_MAX: usize = 255;
/// Largest number of frames of a machine: 64 TiB, which Linux maps with four levels of page tables.
const FRAMES_MAX: u64 = 1 << 34;
/// Number of spots in a block. The memory of a block is allocated when its first spot is filled,
/// because an image may claim more frames than it has.
const BLOCK: usize = 1 << 15;

/// The place of a frame's content. 0: none; 1: all zeros; else image, record and page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Spot(u64);

impl Spot {
    const ZERO: Self = Self(1);

    /// Returns the spot for a page of a record. Record 0 has no frames, so the value differs from
    /// "none" and "zeros".
    fn data(image: usize, record: u64, page: usize) -> Option<Self> {
        let record = u32::try_from(record).ok().filter(|record| *record > 0)?;
        Some(Self((image as u64) << 48 | u64::from(record) << 16 | page as u64))
    }

    fn parts(self) -> (usize, u64, usize) {
        ((self.0 >> 48) as usize, self.0 >> 16 & 0xFFFF_FFFF, (self.0 & 0xFFFF) as usize)
    }
}

/// The spots of all frames that a machine keeps.
#[derive(Debug, Default)]
struct Spots {
    /// Runs of frames in ascending order, each with the number of frames before it.
    runs: Vec<(Run, u64)>,
    /// Number of frames in all runs.
    frames: u64,
    /// Blocks of spots. A block is empty while none of its frames has a spot.
    blocks: Vec<Vec<Spot>>,
    /// Number of filled spots.
    filled: u64,
}

impl Spots {
    fn new(machine: &Machine) -> Result<Self> {
        let unfit = |what: &str| Err(Error::Unfit(format!("{what}: no machine has such memory")));
        let mut spots = Self::default();
        let mut end_phys = 0;
        for range in machine.ranges.iter().filter(|range| range.kind == Kind::Kept) {
            let run = Run { start_phys: range.start_phys, pages: range.pages };
            let aligned = run.start_phys.is_multiple_of(PAGE as u64);
            if !aligned || !is_run(run.start_phys, run.pages) || run.start_phys < end_phys {
                return unfit("its ranges are out of order");
            }
            end_phys = run.start_phys + run.pages * PAGE as u64;
            spots.runs.push((run, spots.frames));
            spots.frames = spots.frames.saturating_add(run.pages);
        }
        if spots.frames > FRAMES_MAX {
            return unfit("it is too large");
        }
        spots.blocks.resize(spots.frames.div_ceil(BLOCK as u64) as usize, Vec::new());
        Ok(spots)
    }

    fn index_of(&self, phys: u64) -> Option<usize> {
        let after = self.runs.partition_point(|(run, _)| run.start_phys <= phys);
        let (run, before) = self.runs[after.checked_sub(1)?];
        Some((before + run.index_of(phys)?) as usize)
    }

    /// Returns the spot of a frame, if it has one.
    fn get(&self, phys: u64) -> Option<Spot> {
        let index = self.index_of(phys)?;
        self.blocks[index / BLOCK].get(index % BLOCK).copied().filter(|spot| *spot != Spot::default())
    }

    fn set(&mut self, phys: u64, spot: Spot) -> std::result::Result<(), String> {
        let Some(index) = self.index_of(phys) else {
            return Err(format!("frame {phys:#x} is not part of the machine's memory"));
        };
        let block = &mut self.blocks[index / BLOCK];
        if block.is_empty() {
            block.resize(BLOCK, Spot::default());
        }
        if block[index % BLOCK] != Spot::default() {
            return Err(format!("frame {phys:#x} is there twice"));
        }
        block[index % BLOCK] = spot;
        self.filled += 1;
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.filled == self.frames
    }
}

/// An image of the chain that was read to its end.
#[derive(Debug)]
struct Link<R> {
    from: R,
    identity: Identity,
    /// Offset of each record in bytes.
    offsets: Vec<u64>,
    /// The two records fetched last, the latest first.
    recent: [Option<(u64, Chunk)>; 2],
}

impl<R: Read + Seek> Link<R> {
    fn place(&self, record: u64) -> Place {
        Place { record, offset: self.offsets.get(record as usize).copied().unwrap_or_default() }
    }

    fn chunk(&mut self, record: u64) -> Result<&Chunk> {
        let is_it = |slot: &Option<(u64, Chunk)>| slot.as_ref().is_some_and(|(known, _)| *known == record);
        if !is_it(&self.recent[0]) {
            self.recent.swap(0, 1);
            if !is_it(&self.recent[0]) {
                let place = self.place(record);
                let (raw_length, payload) = fetch(&mut self.from, place, self.identity, RecordKind::Frames)?;
                self.recent[0] = Some((record, Chunk::expand(&payload, raw_length, place)?));
            }
        }
        let found = self.recent[0].as_ref().map(|(_, chunk)| chunk);
        found.ok_or_else(|| Error::Damaged(self.place(record), "the image is gone".into()))
    }
}

/// Fetches a record that was checked before.
fn fetch(
    from: &mut (impl Read + Seek),
    place: Place,
    identity: Identity,
    kind: RecordKind,
) -> Result<(u64, Vec<u8>)> {
    from.seek(SeekFrom::Start(place.offset))?;
    let (header, payload) = read_record(from, place, Some(identity))?;
    if header.kind != kind {
        return Err(Error::Damaged(place, "it belongs to another image now".into()));
    }
    Ok((header.raw_length, payload))
}

/// Fetches hashes that were checked before.
pub(crate) fn hashes_at(from: &mut (impl Read + Seek), place: Place, identity: Identity) -> Result<Hashes> {
    let (raw_length, payload) = fetch(from, place, identity, RecordKind::Hashes)?;
    Hashes::expand(&payload, raw_length, place)
}

/// The image of the chain that is being read.
#[derive(Debug)]
struct Reading<R> {
    reader: Reader<R>,
    offsets: Vec<u64>,
    spots: Spots,
    hashes: Vec<Place>,
    hashed: u64,
    /// Key and order of the last hash of the image so far.
    last: Option<(Key, u64)>,
}

/// A chain of images that are read one after the other, a full one first.
#[derive(Debug)]
pub struct Chain<R> {
    links: Vec<Link<R>>,
    reading: Option<Reading<R>>,
    /// Spots of the last image that was read.
    spots: Spots,
    hashes: Vec<Place>,
    key: Option<Key>,
    machine: Machine,
    commit: Commit,
}

impl<R: Read + Seek> Default for Chain<R> {
    fn default() -> Self {
        Self {
            links: Vec::new(),
            reading: None,
            spots: Spots::default(),
            hashes: Vec::new(),
            key: None,
            machine: Machine::default(),
            commit: Commit::default(),
        }
    }
}

impl<R: Read + Seek> Chain<R> {
    /// Begins to read the next image.
    ///
    /// # Errors
    /// The file is no image, or was not made on the image before.
    pub fn begin(&mut self, from: R) -> Result<()> {
        let reader = Reader::open(from)?;
        let machine = reader.machine();
        let before = self.links.last().map(|link| link.identity);
        if machine.parents.last().copied() != before {
            let is = match machine.parents.last() {
                Some(parent) => format!("it was made on image {parent}"),
                None => "it is a full image".to_owned(),
            };
            let goes = before.map_or_else(|| "is missing".to_owned(), |before| format!("is not {before}"));
            let text = match machine.parents.is_empty() {
                true => format!("{is}: name it before those made on it"),
                false => format!("{is}, which {goes}: the image that has to come before it"),
            };
            return Err(Error::Unfit(text));
        }
        if self.links.len() > PARENTS_MAX {
            return Err(Error::Unfit(format!("more than {PARENTS_MAX} images come before it")));
        }
        let spots = Spots::new(machine)?;
        let (offsets, hashes) = (vec![0; 1], Vec::new());
        self.reading = Some(Reading { reader, offsets, spots, hashes, hashed: 0, last: None });
        Ok(())
    }

    /// Returns the number of bytes that were read of the image.
    pub fn offset(&self) -> u64 {
        self.reading.as_ref().map_or(0, |reading| reading.reader.offset())
    }

    /// Reads a record. Returns false at the end of a complete image.
    ///
    /// # Errors
    /// The record is damaged, or contradicts the records before it.
    pub fn step(&mut self) -> Result<bool> {
        let image = self.links.len();
        let Some(mut reading) = self.reading.take() else { return Ok(false) };
        let place = reading.reader.place();
        let Some(part) = reading.reader.next_part()? else {
            return self.end(reading, place).map(|()| false);
        };
        reading.offsets.push(place.offset);
        let result = match part {
            Part::Frames(chunk) => add_frames(&mut reading.spots, &self.spots, &chunk, (image, place.record)),
            Part::Hashes(hashes) => {
                reading.hashes.push(place);
                self.add_hashes(&mut reading, &hashes)
            }
        };
        result.map_err(|what| Error::Damaged(place, what))?;
        self.reading = Some(reading);
        Ok(true)
    }

    fn add_hashes(&self, reading: &mut Reading<R>, hashes: &Hashes) -> std::result::Result<(), String> {
        let Some((first, last)) = hashes.ends() else { return Ok(()) };
        let in_order = reading.last.is_none_or(|(_, before)| before < order(first));
        if !in_order || !hashes.is_ordered() {
            return Err("its hashes are not in order".into());
        }
        let known = reading.last.map(|(key, _)| key).or(self.key);
        if known.is_some_and(|key| key != hashes.key) {
            return Err("its hashes were made with another key".into());
        }
        if hashes.iter().any(|(phys, _)| reading.spots.index_of(phys).is_none()) {
            return Err("it has hashes of frames that are not the machine's".into());
        }
        reading.last = Some((hashes.key, order(last)));
        reading.hashed += hashes.hashes.len() as u64;
        Ok(())
    }

    fn end(&mut self, reading: Reading<R>, place: Place) -> Result<()> {
        let Reading { reader, offsets, spots, hashes, hashed, last } = reading;
        if hashed == 0 && spots.is_full() && spots.frames > 0 {
            return Err(Error::Unfit("it has no hashes of its frames".into()));
        }
        if !spots.is_full() || hashed != spots.frames {
            return Err(Error::Damaged(place, "it does not have all of the machine's memory".into()));
        }
        self.key = last.map(|(key, _)| key);
        (self.spots, self.hashes) = (spots, hashes);
        (self.machine, self.commit) =
            (reader.machine().clone(), reader.commit().cloned().unwrap_or_default());
        let identity = reader.identity();
        self.links.push(Link { from: reader.into_inner(), identity, offsets, recent: [None, None] });
        Ok(())
    }

    /// Returns the last image, without its parents.
    ///
    /// # Errors
    /// The chain is empty.
    pub fn merged(self) -> Result<Merged<R>> {
        let Some((last, key)) = self.links.last().zip(self.key).filter(|_| self.reading.is_none()) else {
            return Err(Error::Unfit("there is no image".into()));
        };
        let identity = last.identity;
        let mut machine = self.machine;
        machine.parents.clear();
        let mut hashes = self.hashes;
        hashes.reverse();
        let image = self.links.len() - 1;
        Ok(Merged { links: self.links, spots: self.spots, hashes, key, machine, identity, image })
    }
}

/// Enters the spots of a record's frames, from those of the parent.
fn add_frames(
    to: &mut Spots,
    parent: &Spots,
    chunk: &Chunk,
    (image, record): (usize, u64),
) -> std::result::Result<(), String> {
    let mut page = 0;
    for Frame { phys, source } in chunk.frames.iter().copied() {
        match source {
            Source::Data => {
                let spot = Spot::data(image, record, page).ok_or("there are too many records")?;
                to.set(phys, spot)?;
                page += 1;
            }
            Source::Zero => to.set(phys, Spot::ZERO)?,
            Source::Frame(twin) => {
                let twin = to.get(twin).ok_or_else(|| format!("{twin:#x} does not come before {phys:#x}"))?;
                to.set(phys, twin)?;
            }
            Source::Parent(pages) => {
                for phys in (0..pages).map(|page| phys + page * PAGE as u64) {
                    let spot = parent
                        .get(phys)
                        .ok_or_else(|| format!("its parent does not have frame {phys:#x}"))?;
                    to.set(phys, spot)?;
                }
            }
        }
    }
    Ok(())
}

/// All frames of the last image of a chain.
#[derive(Debug)]
pub struct Merged<R> {
    links: Vec<Link<R>>,
    spots: Spots,
    /// Places of the hashes, in reverse: the next one is last.
    hashes: Vec<Place>,
    key: Key,
    machine: Machine,
    identity: Identity,
    image: usize,
}

impl<R: Read + Seek> Merged<R> {
    /// Returns the last image's description of its machine, without parents.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Returns the last image's identity. The merged image is the last one in another form: images
    /// made on it remain valid.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Returns the key of the last image's hashes.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Returns the number of the image that was read last, which an error concerns.
    pub fn image(&self) -> usize {
        self.image
    }

    /// Returns the next frames, as their hashes.
    ///
    /// # Errors
    /// The image can no longer be read.
    pub fn next_frames(&mut self) -> Result<Option<Hashes>> {
        let Some(place) = self.hashes.pop() else { return Ok(None) };
        self.image = self.links.len() - 1;
        let link = &mut self.links[self.image];
        hashes_at(&mut link.from, place, link.identity).map(Some)
    }

    /// Appends a frame's content to `to`, after a check against its hash.
    ///
    /// # Errors
    /// The image can no longer be read, or the content has another hash.
    pub fn find(&mut self, phys: u64, hash: Hash, to: &mut Vec<u8>) -> Result<()> {
        let spot = self.spots.get(phys).unwrap_or_default();
        let (image, record, page) = spot.parts();
        let wrong = |place| Error::Damaged(place, format!("frame {phys:#x} has changed since"));
        if record == 0 {
            return Err(wrong(Place { record: 0, offset: 0 }));
        }
        self.image = image;
        let link = &mut self.links[image];
        let data = link.chunk(record)?.data.get(page * PAGE..(page + 1) * PAGE);
        match data.filter(|data| self.key.hash(data) == hash) {
            Some(data) => to.extend_from_slice(data),
            None => return Err(wrong(link.place(record))),
        }
        Ok(())
    }
}
