//! Loads a machine's kernel in a process of its own, and leaves what the machine needs of it.
//!
//! The kernel's file, its symbols and the decoder's tables take some 100 MiB for a moment. They go
//! with that process ([`apart`]), which writes the kernel into the guest's memory. The rest of the
//! result is short: the code for slots, and where it leaves the guest.

use std::{collections::BTreeMap, fs, ops::Range, path::Path, thread};

use mercury_afterburner::verify;

use crate::{
    boot::{self, Beginning, Bringup},
    error::{Error, Result},
    gdb::KernelCode,
    generator::Generator,
    kernel::Kernel,
    layout::THUNKS,
    load::{self, DISTANCE, Filled, Loaded},
    machine::LoadedCode,
    memory::Memory,
    process::apart::{Parcel, Plain, apart},
    run::{Options, Report},
    thunks::{self, Exit, Gates},
    user_access::{UserAccess, UserAccesses},
};

/// The result of loading a kernel.
#[derive(Debug)]
pub struct Ready {
    /// The code to be put at [`THUNKS`]: the thunks, the first code, and the gates.
    pub code: Vec<u8>,
    /// The places in the kernel's code at which the monitor has put something.
    pub places: LoadedCode,
    pub facts: Facts,
    /// The kernel's code for a debugger, if one is wanted.
    pub debugged: KernelCode,
}

/// The numbers of a loaded kernel.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub gates: Gates,
    pub beginning: Beginning,
    /// None if there is one processor.
    pub bringup: Option<Bringup>,
    /// None if the kernel has another generator of random numbers.
    pub generator: Option<Generator>,
    pub report: Report,
    root: u64,
    /// The size of the thunks, in bytes.
    thunks: u64,
}

// SAFETY: These have numbers only, and an instruction's numbers.
unsafe impl Plain for Facts {}
// SAFETY: As above.
unsafe impl Plain for Exit {}
// SAFETY: As above.
unsafe impl Plain for UserAccess {}

/// A slot, as it is handed over: its address, the address of its code, and its length in bytes.
type Slot = [u64; 3];

/// Loads the kernel into the guest's memory, with its initial file system.
///
/// # Errors
/// If a file cannot be read, or the kernel is not one that can be hosted.
pub fn load(options: &Options, memory: &Memory) -> Result<Ready> {
    let mut parcel = apart(|parcel| Prepared::new(options, memory)?.put(parcel, options))?;
    take(&mut parcel)
}

/// The kernel, as the process has it that loads it.
struct Prepared {
    kernel: Kernel,
    loaded: Loaded,
    code: Vec<u8>,
    facts: Facts,
}

impl Prepared {
    fn new(options: &Options, memory: &Memory) -> Result<Self> {
        let kernel = parse(&options.kernel)?;
        let mut loaded = thread::scope(|scope| {
            let accounted = scope.spawn(|| account_for(&options.kernel));
            let loaded = load::load(&kernel, memory, options.isolation);
            let accounted = accounted.join();
            accounted.map_err(|_| Error::new("cannot check the kernel's code: this is a bug"))??;
            loaded
        })?;
        boot::put_initramfs(memory, &kernel, &read_initramfs(options)?)?;
        let report = Report::of(&loaded);
        let (code, entry, gates) = lay_out(&kernel, &loaded)?;
        loaded.exits.push(gates.exit);
        let facts = Facts {
            gates,
            beginning: Beginning::of(&kernel, &loaded, entry)?,
            generator: Generator::find(&kernel),
            bringup: (options.cpus > 1).then(|| Bringup::of(&kernel, &loaded)).transpose()?,
            report,
            root: loaded.root,
            thunks: loaded.thunks.len() as u64,
        };
        Ok(Self { kernel, loaded, code, facts })
    }

    /// Puts all of it into a parcel, in the order in which [`take`] takes it.
    fn put(&self, parcel: &mut Parcel, options: &Options) -> Result<()> {
        let Self { kernel, loaded, code, facts } = self;
        parcel.put(&[*facts])?;
        parcel.put(code)?;
        parcel.put(&loaded.exits)?;
        parcel.put(&loaded.accesses)?;
        parcel.put(&loaded.displaced)?;
        let is_debugged = options.gdb.is_some();
        let ranges = kernel.code.iter().map(|code| [code.address.wrapping_add(DISTANCE), code.size]);
        parcel.put(&ranges.filter(|_| is_debugged).collect::<Vec<[u64; 2]>>())?;
        let slots = || loaded.slots.iter().filter(|_| is_debugged);
        parcel
            .put(&slots().map(|(at, one)| [*at, one.code, one.bytes.len() as u64]).collect::<Vec<Slot>>())?;
        parcel.put(&slots().flat_map(|(_, one)| one.bytes.iter().copied()).collect::<Vec<u8>>())
    }
}

fn take(parcel: &mut Parcel) -> Result<Ready> {
    let facts: Facts = parcel.take_one()?;
    let code = parcel.take()?;
    let exits = parcel.take()?;
    let accesses = UserAccesses::new(parcel.take()?, parcel.take()?);
    let places = LoadedCode::new(exits, accesses, facts.root, &facts.gates);
    let ranges: Vec<[u64; 2]> = parcel.take()?;
    let ranges = ranges.into_iter().map(|[start, size]| start..start + size).collect::<Vec<Range<u64>>>();
    let slots: Vec<Slot> = parcel.take()?;
    let mut bytes = parcel.take::<u8>()?.into_iter();
    let filled = |[at, code, length]: Slot| {
        (at, Filled { bytes: bytes.by_ref().take(length as usize).collect(), code })
    };
    let slots: BTreeMap<u64, Filled> = slots.into_iter().map(filled).collect();
    Ok(Ready { code, places, facts, debugged: KernelCode { ranges, slots, slot_code: facts.thunks } })
}

fn parse(path: &Path) -> Result<Kernel> {
    let bytes = fs::read(path).map_err(|error| Error::file("read", path, error))?;
    Kernel::parse(&bytes).map_err(|error| error.about(path.display()))
}

fn read_initramfs(options: &Options) -> Result<Vec<u8>> {
    let Some(path) = &options.initramfs else { return Ok(Vec::new()) };
    fs::read(path).map_err(|error| Error::file("read", path, error))
}

/// Checks the kernel's code against its records, as the afterburner does after a build. A sensitive
/// instruction without a record would trap at best. At worst it would take effect on the host.
///
/// # Errors
/// The first of what is wrong.
fn account_for(kernel: &Path) -> Result<()> {
    const HOW: &str =
        "list all errors with `afterburner verify`, and build the kernel with `afterburner make`";
    let account = verify::verify(kernel).map_err(|error| Error::new(error.message()).hint(HOW))?;
    let Some(first) = account.findings.first() else { return Ok(()) };
    let others = match account.findings.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Err(Error::new(format!("{}: {} in {}{others}", kernel.display(), first.what, first.function)).hint(HOW))
}

/// Puts the first code and the gates after the thunks. Returns all of it, the address of the first
/// code, and the gates.
fn lay_out(kernel: &Kernel, loaded: &Loaded) -> Result<(Vec<u8>, u64, Gates)> {
    let mut code = loaded.thunks.clone();
    let mut add = |multiple: usize, make: &dyn Fn(u64) -> Result<Vec<u8>>| {
        code.resize(code.len().next_multiple_of(multiple), 0);
        let at = THUNKS + code.len() as u64;
        code.extend(make(at)?);
        Ok::<u64, Error>(at)
    };
    let entry = add(16, &|at| boot::stub(kernel, at))?;
    let place = add(64, &|at| thunks::gates(at, loaded.exits.len()).map(|(_, code)| code))?;
    let (gates, _) = thunks::gates(place, loaded.exits.len())?;
    Ok((code, entry, gates))
}
