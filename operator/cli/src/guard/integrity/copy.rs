//! The copy of code and constants: compressed, in a folder of `/run`, which is memory.
//!
//! Each part has two files: `NAME.json` lists its blocks, `NAME.blocks` holds them. A part's copy is never
//! changed. A block also holds the bytes just before and behind it, because a change may lie across the edge.

use super::{
    layout::{Part, Range},
    memory::Memory,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Error, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

/// The folder with the copy.
pub const FOLDER: &str = "/run/mercury/integrity";

const BLOCK: u64 = 64 << 10;
/// Bytes before and behind a block that it holds too.
const MARGIN: u64 = 16;
const LEVEL: i32 = 3;
/// How often a block that changes while it is copied is read again.
const TRIES: usize = 250;

/// Half of a BLAKE3 hash.
pub type Hash = [u8; 16];

/// A block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    pub start: u64,
    pub end: u64,
    /// First address that the block holds, and the end.
    pub from: u64,
    pub until: u64,
    pub is_code: bool,
    pub hash: Hash,
    /// Place in the file, and size there.
    at: u64,
    size: u64,
}

/// The copy of a part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    pub part: Part,
    pub blocks: Vec<Block>,
}

/// The copy of all parts.
#[derive(Debug)]
pub struct Copy {
    folder: PathBuf,
    pub parts: BTreeMap<String, Copied>,
}

/// Returns the hash of a block.
#[must_use]
pub fn hash(bytes: &[u8]) -> Hash {
    let mut hash = Hash::default();
    hash.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    hash
}

impl Copy {
    /// Opens the copy in a folder, or begins one. A copy of an earlier start of the kernel is removed.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be made or read.
    pub fn open(folder: &Path, boot: &str) -> io::Result<Self> {
        let stamp = folder.join("boot");
        if fs::read_to_string(&stamp).is_ok_and(|old| old != boot) {
            fs::remove_dir_all(folder)?;
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        fs::write(stamp, boot)?;
        let mut parts = BTreeMap::new();
        for file in fs::read_dir(folder)? {
            let path = file?.path();
            if path.extension().is_some_and(|ending| ending == "part") {
                let copied: Copied = serde_json::from_slice(&fs::read(path)?)?;
                parts.insert(copied.part.name.clone(), copied);
            }
        }
        Ok(Self { folder: folder.to_owned(), parts })
    }

    /// Returns true while the folder is there: `mercury guard off` removes it.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.folder.join("boot").exists()
    }

    /// Copies a part. `is_quiet` returns true while the kernel changes no code.
    ///
    /// # Errors
    ///
    /// Returns an error if memory cannot be read, or there is no room.
    pub fn add(
        &mut self,
        part: Part,
        memory: &impl Memory,
        is_quiet: impl Fn() -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut data = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.data(&part.name))?;
        let (mut blocks, mut at) = (Vec::new(), 0);
        for mut block in part.ranges.iter().flat_map(blocks_of) {
            let bytes = steady(memory, &block, &is_quiet)?;
            let packed = zstd::bulk::compress(&bytes, LEVEL)?;
            data.write_all(&packed)?;
            (block.hash, block.at, block.size) = (hash(&bytes), at, packed.len() as u64);
            at += block.size;
            blocks.push(block);
        }
        let copied = Copied { part, blocks };
        let new = self.folder.join("new");
        fs::write(&new, serde_json::to_vec(&copied)?)?;
        fs::rename(new, self.index(&copied.part.name))?;
        self.parts.insert(copied.part.name.clone(), copied);
        Ok(())
    }

    /// Removes parts that are not among these.
    pub fn keep(&mut self, names: &[String]) {
        let gone: Vec<_> = self.parts.keys().filter(|name| !names.contains(name)).cloned().collect();
        for name in gone {
            self.parts.remove(&name);
            let _ = fs::remove_file(self.index(&name));
            let _ = fs::remove_file(self.data(&name));
        }
    }

    /// Returns the content of a block.
    ///
    /// # Errors
    ///
    /// Returns an error if the copy itself is damaged.
    pub fn content(&self, part: &str, block: &Block) -> io::Result<Vec<u8>> {
        let mut packed = vec![0; usize::try_from(block.size).map_err(Error::other)?];
        File::open(self.data(part))?.read_exact_at(&mut packed, block.at)?;
        let size = usize::try_from(block.until - block.from).map_err(Error::other)?;
        let bytes = zstd::bulk::decompress(&packed, size)?;
        if bytes.len() != size || hash(&bytes) != block.hash {
            return Err(Error::other(format!("the copy of {part} at {:#x} is damaged", block.start)));
        }
        Ok(bytes)
    }

    /// Returns the bytes of all parts in memory, and in the copy.
    #[must_use]
    pub fn size(&self) -> (u64, u64) {
        let blocks = self.parts.values().flat_map(|copied| &copied.blocks);
        blocks.fold((0, 0), |(bytes, packed), block| (bytes + block.end - block.start, packed + block.size))
    }

    fn index(&self, part: &str) -> PathBuf {
        self.folder.join(format!("{part}.part"))
    }

    fn data(&self, part: &str) -> PathBuf {
        self.folder.join(format!("{part}.blocks"))
    }
}

/// Reads a block until two readings are the same, and the kernel changed no code before, between and after.
fn steady(
    memory: &impl Memory,
    block: &Block,
    is_quiet: impl Fn() -> io::Result<bool>,
) -> io::Result<Vec<u8>> {
    for _ in 0..TRIES {
        if is_quiet()? {
            let first = read(memory, block)?;
            if is_quiet()? && read(memory, block)? == first && is_quiet()? {
                return Ok(first);
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(Error::other(format!("the kernel changes its code at {:#x} again and again", block.start)))
}

/// Reads a block from memory.
///
/// # Errors
///
/// Returns an error if memory cannot be read.
pub fn read(memory: &impl Memory, block: &Block) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(block.until - block.from).map_err(Error::other)?];
    memory.read(block.from, &mut bytes)?;
    Ok(bytes)
}

fn blocks_of(range: &Range) -> impl Iterator<Item = Block> {
    let (first, last, is_code) = (range.start, range.end, range.is_code);
    (0..(last - first).div_ceil(BLOCK)).map(move |index| {
        let start = first + index * BLOCK;
        let end = last.min(start + BLOCK);
        let (from, until) = (first.max(start.saturating_sub(MARGIN)), last.min(end + MARGIN));
        Block { start, end, from, until, is_code, hash: [0; 16], at: 0, size: 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const START: u64 = 0xFFFF_FFFF_8100_0000;

    /// Memory that holds the same everywhere.
    struct Sevens;

    impl Memory for Sevens {
        fn read(&self, _: u64, to: &mut [u8]) -> io::Result<()> {
            to.fill(7);
            Ok(())
        }
    }

    /// The kernel is in the middle of a change at the first three questions.
    #[test]
    fn nothing_is_copied_while_the_kernel_changes_code() {
        let range = Range { start: START, end: START + 64, is_code: true };
        let block = blocks_of(&range).next().expect("a block");
        let (asked, read_at) = (Cell::new(0), Cell::new(0));
        struct Noted<'a>(&'a Cell<u32>, &'a Cell<u32>);
        impl Memory for Noted<'_> {
            fn read(&self, address: u64, to: &mut [u8]) -> io::Result<()> {
                self.1.set(self.0.get());
                Sevens.read(address, to)
            }
        }
        let is_quiet = || {
            asked.set(asked.get() + 1);
            Ok(asked.get() > 3)
        };
        steady(&Noted(&asked, &read_at), &block, is_quiet).expect("bytes");
        assert_eq!((read_at.get(), asked.get()), (5, 6));
        assert!(steady(&Sevens, &block, || Err(Error::other("no memory"))).is_err());
    }

    #[test]
    fn a_damaged_copy_mends_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = Sevens;
        let mut copy = Copy::open(folder.path(), "boot").expect("a copy");
        let range = Range { start: START, end: START + 4096, is_code: false };
        let part = Part { name: "kernel".into(), ranges: vec![range], jumps: (0, 0), calls: (0, 0) };
        copy.add(part, &memory, || Ok(true)).expect("a copy");
        let file = folder.path().join("kernel.blocks");
        let mut packed = fs::read(&file).expect("blocks");
        let last = packed.len() - 1;
        packed[last] ^= 1;
        fs::write(&file, packed).expect("blocks");
        assert!(copy.content("kernel", &copy.parts["kernel"].blocks[0]).is_err());
        // A copy of an earlier start is gone.
        assert!(Copy::open(folder.path(), "later").expect("a copy").parts.is_empty());
    }
}
