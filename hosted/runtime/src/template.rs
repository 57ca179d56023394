//! A saved machine from which clones begin ([`crate::memory::layers`]).
//!
//! A template has done what each start of the same machine does: its kernel is loaded, the saved machine is
//! checked, and its memory is in a file that nobody can write to. A clone is a copy of the template's process
//! (`fork`), which maps that memory and goes on from the saved state. So a clone reads no file and copies no
//! memory.

use std::{
    convert::Infallible,
    os::fd::{AsRawFd, RawFd},
    path::Path,
    sync::Arc,
};

use crate::{
    error::{Error, Result},
    fork::{Image, Pair, Source},
    heap,
    loader::{self, Ready},
    memory::{Memory, holes, layers::Run},
    process::{self, Fork},
    run::{self, Isolation, Options, Prepared},
    sandbox,
    saved::Saved,
    thunks,
};

/// Each piece of own pages splits the direct map and the window twice. So many of the mappings that the host
/// allows are for each piece, with a reserve for programs.
const MAPPINGS_PER_PIECE: u64 = 8;

/// A saved machine that is ready to be cloned.
#[derive(Debug)]
pub struct Template {
    /// The saved machine.
    image: Arc<Image>,
    /// None in a clone, which has taken it.
    original: Option<Original>,
}

#[derive(Debug)]
struct Original {
    options: Options,
    ready: Ready,
    most_mapped: u64,
    clock_khz: u64,
}

/// A machine that has begun as a clone.
#[derive(Debug)]
pub struct Started {
    /// The process number of the machine's first process.
    pub process: i32,
    /// The way to the machine, by which it can be forked.
    pub source: Source,
}

impl Template {
    /// Loads the kernel, and takes the saved machine.
    ///
    /// # Errors
    /// If the file is damaged or the host does not have what the machine needs.
    pub fn new(options: &Options, saved: &Path) -> Result<Self> {
        can_be_cloned(options)?;
        let most_mapped = run::begin(options)?;
        let saved = Saved::open(saved)?;
        run::check_memory(options)?;
        let memory = Memory::for_base(options.memory)?;
        let ready = loader::load(options, &memory)?;
        if ready.facts.generator.is_none() {
            return Err(Error::new(
                "the kernel's generator of random numbers is not known: its clones would make the same keys",
            )
            .hint("use a kernel from 5.18 on"));
        }
        let state = run::fill(saved, &memory)?;
        let base = memory.into_base()?;
        // Large parts that were never used are a clone's own from the beginning.
        let holes = holes(base.as_raw_fd(), options.memory);
        let runs = holes.into_iter().map(|pages| Run { pages, level: 1 }).collect();
        let image = Arc::new(Image::with_state(vec![base], runs, &state)?);
        let (options, clock_khz) = (options.clone(), run::clock_khz());
        // What all clones need is made once, in memory that they share.
        thunks::prepare_tables();
        heap::give_back();
        Ok(Self { image, original: Some(Original { options, ready, most_mapped, clock_khz }) })
    }

    /// Starts a clone of the saved machine, or of a machine that was forked: a process that is a copy of this
    /// one, which must have one thread. `begin` is called in the clone, and may change its options. All
    /// descriptors but the first three and `kept` are closed there. If the clone cannot start, it ends with
    /// the status that `failed` returns.
    ///
    /// # Errors
    /// If the host refuses a process or a socket.
    pub fn start(
        &mut self,
        image: Option<&Arc<Image>>,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
        failed: impl FnOnce(Error) -> i32,
    ) -> Result<Started> {
        let pair = Pair::new()?;
        let image = Arc::clone(image.unwrap_or(&self.image));
        match process::fork() {
            Fork::Parent(process) => Ok(Started { process, source: pair.into_source(process, image) }),
            Fork::Refused => Err(Error::system("start a process")
                .hint("the host limits your processes: end some machines, or raise ulimit -u")),
            Fork::Child => {
                let started = self.original.take().map_or_else(
                    || Err(Error::new("a clone has no template: this is a bug")),
                    |original| original.become_clone(&image, pair, kept, begin),
                );
                let status = match started {
                    Ok(never) => match never {},
                    Err(error) => failed(error),
                };
                // SAFETY: It ends the process, without the destructors of the template's values.
                unsafe { libc::_exit(status) }
            }
        }
    }
}

/// Checks that machines with these options can be clones.
fn can_be_cloned(options: &Options) -> Result<()> {
    if options.isolation == Isolation::Process {
        return Err(Error::new("machines with --isolation=process cannot be cloned yet")
            .hint("save a machine that was started without --isolation"));
    }
    if let Some(disk) = options.disks.iter().find(|disk| !disk.read_only) {
        let path = disk.path.display();
        return Err(Error::new(format!("clones would all write to {path}"))
            .hint(format!("start the machine with --disk {path},ro before you save it")));
    }
    if options.subnet.is_some() {
        return Err(Error::new("clones would all have one address on their subnet")
            .hint("leave out --net subnet, and save a machine without it"));
    }
    if options.control.is_some() || options.gdb.is_some() || options.cpus != 1 {
        return Err(Error::new("a clone has one processor, no gdb, and no socket of its own")
            .hint("leave out --control, --gdb and --cpus"));
    }
    Ok(())
}

impl Original {
    fn become_clone(
        mut self,
        image: &Image,
        pair: Pair,
        kept: RawFd,
        begin: impl FnOnce(&mut Options) -> Result<()>,
    ) -> Result<Infallible> {
        begin(&mut self.options)?;
        let state = image.state().map_err(|error| Error::new(format!("cannot read the state: {error}")))?;
        let link = pair.into_link();
        let files = image.files().iter().map(|file| file.as_raw_fd());
        sandbox::keep_only(files.clone().chain(link.descriptors()).chain([kept]))?;
        let most_pieces = u32::try_from(self.most_mapped / MAPPINGS_PER_PIECE).unwrap_or(u32::MAX);
        let memory = Memory::over(files, self.options.memory, image.runs(), most_pieces)?;
        // Clones must not make the same keys.
        if let Some(generator) = self.ready.facts.generator {
            generator.reseed(&memory)?;
        }
        let prepared = Prepared {
            ready: self.ready,
            restored: Some(state),
            most_mapped: self.most_mapped / 2,
            clock_khz: self.clock_khz,
            link: Some(link),
        };
        run::launch(&self.options, memory, prepared)
    }
}
