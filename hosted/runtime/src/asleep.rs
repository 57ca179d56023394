//! A machine that is asleep: all of it is in a file, and it has no process.
//!
//! Two processes do the work beside the template, because the template must answer meanwhile, and because
//! nothing of a machine must stay in it: all other machines are copies of it. One writes a machine that
//! stands still ([`crate::control::save_image_as`]). The other one reads the file ([`load`]): pages that are
//! as in the template's base are shared again, and all others are the machine's own.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    path::Path,
    sync::Arc,
};

use crate::{
    error::{Error, Result},
    fork::{self, Image},
    generator::random,
    layout::PAGE,
    memory::{blocks, layers::Run, new_file},
    process::{self, Fork},
    sandbox,
    saved::{Life, Saved, Still},
};

/// The number of pieces of own pages from which neighbours are joined. The host limits mappings.
const MOST_PIECES: usize = 2048;

/// Files without names into which a machine is read.
#[derive(Debug)]
pub struct Room {
    state: File,
    places: File,
    own: OwnedFd,
}

/// A machine that was read.
#[derive(Debug)]
pub struct Loaded {
    pub image: Arc<Image>,
    /// The file of its own pages.
    pub own: OwnedFd,
}

impl Room {
    /// Makes the files for a machine whose memory has this size.
    ///
    /// # Errors
    /// If the host refuses.
    pub fn new(size: u64) -> Result<Self> {
        let file = || new_file(c"mercury-state", 0, 0).map(File::from);
        let own = new_file(c"mercury-hosted", size, libc::MFD_ALLOW_SEALING)?;
        Ok(Self { state: file()?, places: file()?, own })
    }

    /// Returns the descriptors of all files.
    #[must_use]
    pub fn descriptors(&self) -> [RawFd; 3] {
        [self.state.as_raw_fd(), self.places.as_raw_fd(), self.own.as_raw_fd()]
    }

    /// Returns the memory that [`load`] has filled so far, in bytes.
    #[must_use]
    pub fn filled(&self) -> u64 {
        blocks(self.own.as_raw_fd()) * 512
    }

    /// Returns the machine after [`load`] has succeeded with these files.
    ///
    /// # Errors
    /// If the host cannot read them.
    pub fn into_machine(self, base: &Image) -> Result<Loaded> {
        let Self { state, places, own } = self;
        let runs = fork::read_places(&places).map_err(cannot_read)?;
        let image = Image::new(base.files().to_vec(), runs, Vec::new(), state)?;
        Ok(Loaded { image: Arc::new(image), own })
    }
}

fn cannot_read(error: io::Error) -> Error {
    Error::new(format!("cannot read a machine that is asleep: {error}"))
        .hint("the host may have no memory: end a machine, or try again")
}

/// Reads a machine into files, beside a base of which it is a copy. The file must have this life.
///
/// # Errors
/// If the file is damaged or another one, or the host has no memory.
pub fn load(file: &Path, life: &Life, base: &Image, room: &Room) -> Result<()> {
    let saved = Saved::open(file)?;
    if saved.life != *life {
        return Err(Error::new(format!("{} is another machine's file", file.display()))
            .hint("put the file back that was written when the machine fell asleep"));
    }
    let own = File::from(room.own.as_fd().try_clone_to_owned().map_err(cannot_read)?);
    let mut places = vec![false; (base.size() / PAGE) as usize];
    let level = base.files().len() as u8;
    // Parts of the base that were never used are each machine's own.
    for run in base.runs().iter().filter(|run| run.level == level) {
        mark(&mut places, run.pages.clone());
    }
    let mut at = 0;
    saved.runs(|first, bytes| {
        let count = bytes.len() as u64 / PAGE;
        if first < at || count > places.len() as u64 || first > places.len() as u64 - count {
            return Ok(None);
        }
        differ(base, at..first, None, &mut places, &own).map_err(cannot_read)?;
        at = first + count;
        differ(base, first..at, Some(bytes), &mut places, &own).map_err(cannot_read)?;
        Ok(Some(()))
    })?;
    differ(base, at..places.len() as u64, None, &mut places, &own).map_err(cannot_read)?;
    join(&mut places, |page| {
        let mut content = [0; PAGE as usize];
        base.read(page * PAGE, &mut content)?;
        own.write_all_at(&content, page * PAGE)
    })
    .map_err(cannot_read)?;
    let runs: Vec<Run> = pieces(&places).into_iter().map(|pages| Run { pages, level }).collect();
    fork::write_places(&room.places, &runs).map_err(cannot_read)?;
    room.state.write_all_at(&saved.state, 0).map_err(cannot_read)
}

fn mark(places: &mut [bool], pages: Range<u64>) {
    if let Some(places) = places.get_mut(pages.start as usize..pages.end as usize) {
        places.fill(true);
    }
}

/// Makes pages the machine's own that differ from the base. Without bytes they are zero.
fn differ(
    base: &Image,
    pages: Range<u64>,
    bytes: Option<&[u8]>,
    places: &mut [bool],
    own: &File,
) -> io::Result<()> {
    const ZERO: [u8; PAGE as usize] = [0; PAGE as usize];
    let mut below = ZERO;
    for page in pages.clone() {
        let content = bytes.map_or(&ZERO[..], |bytes| {
            let at = ((page - pages.start) * PAGE) as usize;
            &bytes[at..at + PAGE as usize]
        });
        base.read(page * PAGE, &mut below)?;
        if content == below && !places[page as usize] {
            continue;
        }
        places[page as usize] = true;
        if content != ZERO {
            own.write_all_at(content, page * PAGE)?;
        }
    }
    Ok(())
}

/// Returns the ranges of own pages.
fn pieces(places: &[bool]) -> Vec<Range<u64>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    for page in (0..places.len() as u64).filter(|page| places[*page as usize]) {
        match pieces.last_mut() {
            Some(last) if last.end == page => last.end += 1,
            _ => pieces.push(page..page + 1),
        }
    }
    pieces
}

/// Makes pages between pieces the machine's own until there are few pieces. The shortest gaps come first.
fn join(places: &mut [bool], mut copy: impl FnMut(u64) -> io::Result<()>) -> io::Result<()> {
    let mut most = 1;
    loop {
        let pieces = pieces(places);
        if pieces.len() <= MOST_PIECES {
            return Ok(());
        }
        let gaps = pieces.windows(2).map(|two| two[0].end..two[1].start);
        for gap in gaps.filter(|gap| gap.end - gap.start <= most) {
            gap.clone().try_for_each(&mut copy)?;
            mark(places, gap);
        }
        most *= 2;
    }
}

/// Returns the life of a new file.
///
/// # Errors
/// If the host has no random numbers.
pub fn new_life() -> Result<Life> {
    random()
}

/// Starts a process that is a copy of this one, which must have one thread. It does some work and ends. It
/// keeps the first three descriptors and these, and ends with this process. Returns its number.
///
/// # Errors
/// If the host refuses a process.
pub fn start_helper(
    kept: impl Iterator<Item = RawFd> + Clone,
    work: impl FnOnce() -> Result<()>,
    failed: impl FnOnce(Error) -> i32,
) -> Result<i32> {
    // SAFETY: It takes nothing.
    let parent = unsafe { libc::getpid() };
    match process::fork() {
        Fork::Parent(process) => Ok(process),
        Fork::Refused => Err(Error::system("start a process")),
        Fork::Child => {
            let done = become_helper(parent, kept).and_then(|()| work());
            let status = done.map_or_else(failed, |()| 0);
            // SAFETY: It ends the process, without the destructors of the template's values.
            unsafe { libc::_exit(status) }
        }
    }
}

fn become_helper(parent: i32, kept: impl Iterator<Item = RawFd> + Clone) -> Result<()> {
    // SAFETY: The calls take numbers.
    let is_bound = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) == 0 && libc::getppid() == parent
    };
    if !is_bound {
        return Err(Error::system("end with the template"));
    }
    sandbox::keep_only(kept)
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{control::save_image_as, memory::seal};

    const PAGES: u64 = 700;

    /// Makes a sealed file with a word at the beginning of each page. A page of zero is a hole.
    fn sealed(word: impl Fn(u64) -> u64) -> OwnedFd {
        let file = File::from(new_file(c"test", PAGES * PAGE, libc::MFD_ALLOW_SEALING).unwrap());
        for page in (0..PAGES).filter(|page| word(*page) != 0) {
            file.write_all_at(&word(page).to_le_bytes(), page * PAGE).unwrap();
        }
        let file = file.into();
        seal(&file).unwrap();
        file
    }

    fn word(file: &impl Still, page: u64) -> u64 {
        let mut word = [0; 8];
        file.read(page * PAGE, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    /// A machine that was written to a file and read again has the same memory. It shares what it shared.
    #[test]
    fn a_machine_wakes_as_it_fell_asleep() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("asleep");
        // From page 500 on the base was never used.
        let in_base = |page| if page < 500 { page + 1 } else { 0 };
        let runs = vec![Run { pages: 500..PAGES, level: 1 }];
        let base = Image::with_state(vec![sealed(in_base)], runs, vec![], b"first").unwrap();
        let changed = |page: u64| match page {
            10..20 | 600..610 => 1 << 32 | page,
            20..25 => 0,
            30 => page + 1,
            _ => in_base(page),
        };
        let own = vec![Run { pages: 10..31, level: 1 }, Run { pages: 500..PAGES, level: 1 }];
        let level = base.files()[0].try_clone().unwrap();
        let machine = Image::with_state(vec![level, sealed(changed)], own, vec![], b"second").unwrap();
        save_image_as(&machine, &file, &[7; 16]).unwrap();
        let room = Room::new(PAGES * PAGE).unwrap();
        assert!(load(&file, &[8; 16], &base, &room).unwrap_err().message().contains("another machine"));
        load(&file, &[7; 16], &base, &room).unwrap();
        let Loaded { image, own } = room.into_machine(&base).unwrap();
        assert_eq!(image.state().unwrap(), b"second");
        let expected = [10..25, 500..PAGES].map(|pages| Run { pages, level: 1 });
        assert_eq!(image.runs(), expected, "pages that are as in the base are shared again");
        let own = File::from(own);
        let blocks = std::os::unix::fs::MetadataExt::blocks(&own.metadata().unwrap());
        assert_eq!(blocks, 20 * PAGE / 512, "pages of zeros are holes");
        for page in 0..PAGES {
            let is_own = expected.iter().any(|run| run.pages.contains(&page));
            let mut there = [0; 8];
            own.read_exact_at(&mut there, page * PAGE).unwrap();
            let there = if is_own { u64::from_le_bytes(there) } else { word(&base, page) };
            assert_eq!(there, changed(page), "{page}");
        }
    }

    #[test]
    fn many_pieces_are_joined_by_the_pages_between_them() {
        let mut places: Vec<bool> = (0..20_000).map(|page| page % 4 == 0 || page < 100).collect();
        let before = places.clone();
        let mut copied = Vec::new();
        join(&mut places, |page| {
            copied.push(page as usize);
            Ok(())
        })
        .unwrap();
        assert!(pieces(&places).len() <= MOST_PIECES);
        for page in 0..before.len() {
            assert_eq!(places[page], before[page] || copied.contains(&page));
        }
        assert!(join(&mut before.clone(), |_| Err(io::ErrorKind::OutOfMemory.into())).is_err());
    }
}
