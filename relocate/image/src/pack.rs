//! The conversion of frames to parts of an image. It finds zeros, twins, and frames unchanged since
//! the parent.

use crate::{
    error::Result,
    hashes::{Hash, Hashes, Key, is_zero},
    record::{Chunk, Frame, PAGE, Part, Source},
};

/// Number of remembered pages, a power of two.
const TWINS: usize = 1 << 16;

/// A packer of frames: frames go in, in order, and parts come out.
#[derive(Debug)]
pub struct Packer {
    twins: Twins,
    chunk: Chunk,
    hashes: Hashes,
}

impl Packer {
    /// Returns a packer whose hashes are made with `key`.
    #[must_use]
    pub fn new(key: Key) -> Self {
        let hashes = Hashes { key, ..Hashes::default() };
        Self { twins: Twins::new(), chunk: Chunk::default(), hashes }
    }

    /// Adds a frame. `before` is the hash that the parent has of it.
    pub fn add(&mut self, phys: u64, page: &[u8], before: Option<Hash>) {
        let hash = self.hashes.key.hash(page);
        self.hashes.add(phys, hash);
        if before == Some(hash) {
            self.twins.note(phys, hash);
            self.leave(phys);
        } else if let Some(source) = self.known(phys, hash) {
            self.chunk.frames.push(Frame { phys, source });
        } else {
            self.put(phys, page);
        }
    }

    /// Adds a frame with a known hash. Calls `find` for the content only if the content has to be
    /// written.
    ///
    /// # Errors
    /// `find` fails.
    pub fn add_known(
        &mut self,
        phys: u64,
        hash: Hash,
        find: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        self.hashes.add(phys, hash);
        if let Some(source) = self.known(phys, hash) {
            self.chunk.frames.push(Frame { phys, source });
            return Ok(());
        }
        self.chunk.frames.push(Frame { phys, source: Source::Data });
        find(&mut self.chunk.data)
    }

    /// Returns a part that is full, if there is one.
    pub fn full(&mut self) -> Option<Part> {
        if self.chunk.is_full() {
            return Some(Part::Frames(std::mem::take(&mut self.chunk)));
        }
        self.hashes.is_full().then(|| self.take_hashes())
    }

    /// Returns the parts that are left at the end.
    #[must_use]
    pub fn finish(mut self) -> [Part; 2] {
        let hashes = self.take_hashes();
        [Part::Frames(self.chunk), hashes]
    }

    fn take_hashes(&mut self) -> Part {
        let key = self.hashes.key;
        Part::Hashes(std::mem::replace(&mut self.hashes, Hashes { key, ..Hashes::default() }))
    }

    fn known(&mut self, phys: u64, hash: Hash) -> Option<Source> {
        if is_zero(&hash) {
            return Some(Source::Zero);
        }
        let twin = self.twins.find(hash).map(Source::Frame);
        if twin.is_none() {
            self.twins.note(phys, hash);
        }
        twin
    }

    fn put(&mut self, phys: u64, page: &[u8]) {
        self.chunk.frames.push(Frame { phys, source: Source::Data });
        self.chunk.data.extend_from_slice(page);
    }

    /// Records a frame as unchanged since the parent. Adjacent ones share an entry.
    fn leave(&mut self, phys: u64) {
        if let Some(Frame { phys: start, source: Source::Parent(pages) }) = self.chunk.frames.last_mut()
            && *start + *pages * PAGE as u64 == phys
        {
            *pages += 1;
        } else {
            self.chunk.frames.push(Frame { phys, source: Source::Parent(1) });
        }
    }
}

/// The pages seen so far, by their hash: each slot keeps the last one.
#[derive(Debug)]
struct Twins {
    slots: Vec<(Hash, u64)>,
}

impl Twins {
    fn new() -> Self {
        Self { slots: vec![(Hash::default(), u64::MAX); TWINS] }
    }

    fn slot(hash: Hash) -> usize {
        usize::from(u16::from_le_bytes([hash[0], hash[1]])) % TWINS
    }

    /// Returns an earlier frame with the same content, if one is remembered.
    fn find(&self, hash: Hash) -> Option<u64> {
        let (known, phys) = self.slots[Self::slot(hash)];
        (phys != u64::MAX && known == hash).then_some(phys)
    }

    fn note(&mut self, phys: u64, hash: Hash) {
        self.slots[Self::slot(hash)] = (hash, phys);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(before: &dyn Fn(u64) -> Option<Hash>, data: &[u8]) -> (Chunk, Hashes) {
        let mut packer = Packer::new(Key([1; 32]));
        for (number, page) in data.chunks(PAGE).enumerate() {
            let phys = 0x1000 * (number as u64 + 1);
            packer.add(phys, page, before(phys));
            assert_eq!(packer.full(), None);
        }
        let [Part::Frames(chunk), Part::Hashes(hashes)] = packer.finish() else { panic!("other parts") };
        (chunk, hashes)
    }

    #[test]
    fn zeros_and_twins_are_found() {
        let mut data = vec![0; 4 * PAGE];
        data[PAGE + 7] = 1;
        data[3 * PAGE + 7] = 1;
        let (chunk, hashes) = packed(&|_| None, &data);
        let sources: Vec<_> = chunk.frames.iter().map(|frame| frame.source).collect();
        assert_eq!(sources, [Source::Zero, Source::Data, Source::Zero, Source::Frame(0x2000)]);
        assert_eq!(chunk.data.len(), PAGE);
        assert_eq!(hashes.runs.len(), 1);
        assert_eq!(hashes.hashes[1], hashes.hashes[3]);
        assert!(is_zero(&hashes.hashes[0]) && !is_zero(&hashes.hashes[1]));
    }

    /// Unchanged frames take one entry, however many they are; a frame like one of them is still
    /// found as a twin.
    #[test]
    fn frames_as_in_the_parent_are_left_out() {
        let mut data: Vec<u8> = (0..5 * PAGE).map(|at| (at / PAGE) as u8).collect();
        let (_, hashes) = packed(&|_| None, &data);
        let before = |phys: u64| hashes.iter().find(|(frame, _)| *frame == phys).map(|(_, hash)| hash);
        let (chunk, same) = packed(&before, &data);
        assert_eq!(chunk.frames, [Frame { phys: 0x1000, source: Source::Parent(5) }]);
        assert_eq!((chunk.pages(), chunk.unchanged(), &same), (5, 5, &hashes));
        data[3 * PAGE..4 * PAGE].fill(1);
        let (chunk, _) = packed(&before, &data);
        let sources: Vec<_> = chunk.frames.iter().map(|frame| frame.source).collect();
        assert_eq!(sources, [Source::Parent(3), Source::Frame(0x2000), Source::Parent(1)]);
    }
}
