//! The work of each way: PostgreSQL under pgbench, and a part of a kernel's build. Programs,
//! database and sources are on one read-only disk; writes go to memory. The lab keeps the disk
//! under `target/lab/tools/` by the hash of its recipe.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use super::{
    peers::once,
    ways::{Files, Job},
};
use mercury_lab::{
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    image::{self, Image, Release},
    paths,
    previrtualization::root,
};

/// The name of a transaction among the benchmarks.
pub const POSTGRES: &str = "postgresql";
/// The name of the build among the benchmarks.
pub const BUILD: &str = "build";

const INIT: &str = "/work/run";
const SCRIPTS: &[(&str, &str)] = &[
    ("run", include_str!("../../../guest/hosted/work")),
    ("timed", include_str!("../../../guest/bench/timed")),
];
/// The configuration of the kernel whose part is built. Everything else that the part needs is
/// built before.
const CONFIGURATION: &str = include_str!("../../../guest/kernel/tiny.config");
pub const PART: &str = "kernel/time/";
/// The seconds of pgbench.
const SECONDS: u32 = 10;
/// The script that prepares the build in the root for kernels. It removes the part's objects, so
/// that the part is built again.
const PREPARE: &str = "\
set -e
cd /build/work
make -s -C /build/$1 O=/build/work/objects KCONFIG_ALLCONFIG=/build/work/config allnoconfig
make -C /build/$1 O=/build/work/objects -j1 $2
find objects/$2 -name '*.o' -delete -o -name '*.a' -delete -o -name '.*.cmd' -delete";
/// Folders of Debian's tree that the work does not need.
const UNUSED: &[&str] = &["boot", "build", "usr/lib/modules", "usr/src", "usr/lib/debug", "usr/share/perl"];
/// A program that the build needs and Debian's tree lacks. The root for kernels has it; the tree
/// has its libraries.
const CALCULATOR: &str = "usr/bin/bc";
const MEMORY_MIB: u32 = 1024;
const SIZE: &str = "5G";
/// Time limit, in seconds. An emulated machine takes thirty times as long as a processor.
const LIMIT_S: u32 = 3600;

/// Returns the work. It is made first if it is missing.
///
/// # Errors
/// If a package cannot be fetched or a program does not build.
pub fn job(release: Release) -> Result<Job> {
    let (image, kernels) = (Image::ensure(release)?.tree(), root::ensure(release)?);
    let recipe = Ingredients::default()
        .with(format!("{image:?} {kernels:?} {UNUSED:?} {CALCULATOR}"))
        .with(PREPARE)
        .with(SIZE);
    let recipe =
        SCRIPTS.iter().fold(recipe.with(CONFIGURATION).with(plan()), |all, (_, text)| all.with(text));
    let dir = paths::lab_dir("tools")?.join(format!("work-{}", recipe.name()));
    once(&format!("kernel-{release}"), &dir, |new| make(release, &image, &kernels, new))?;
    Ok(Job {
        tree: dir.join("tree"),
        files: Files::Disk(dir.join("work.img")),
        init: INIT,
        memory_mib: MEMORY_MIB,
        limit_s: LIMIT_S,
    })
}

fn plan() -> String {
    format!("{SECONDS} {PART}\n")
}

fn make(release: Release, image: &Path, kernels: &Path, new: &Path) -> Result<()> {
    let source = root::source(release);
    let objects = prepare(source, kernels)?;
    let tree = new.join("tree");
    let run = |program: &str, words: &[&Path]| {
        host::run(
            "a tree with PostgreSQL and a kernel's source",
            "work-tree",
            host::as_root(program).args(words),
        )
    };
    // Hard links suffice: nothing is written there.
    run("cp", &[Path::new("-al"), image, &tree])?;
    let unused: Vec<PathBuf> = UNUSED.iter().map(|name| tree.join(name)).collect();
    unused.iter().try_for_each(|path| host::remove_tree(path))?;
    let (build, own) = (tree.join("build"), tree.join("work"));
    run("mkdir", &[&build, &own])?;
    run("cp", &[Path::new("-al"), &kernels.join("build").join(source), &build])?;
    run("cp", &[Path::new("-l"), &kernels.join(CALCULATOR), &tree.join(CALCULATOR)])?;
    run("mv", &[&objects, &build])?;
    for (name, text) in SCRIPTS.iter().copied().chain([("plan", plan().as_str())]) {
        let path = new.join(name);
        fs::write(&path, text).context(|| format!("write {}", path.display()))?;
        let all = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, all).context(|| format!("let {} be executed", path.display()))?;
        run("mv", &[&path, &own])?;
    }
    image::make_disk("a disk of it", &tree, &new.join("work.img"), "mercury-work", SIZE)
}

/// Builds with the release's compiler everything that the part needs. Returns the path.
fn prepare(source: &str, kernels: &Path) -> Result<PathBuf> {
    let place = kernels.join("build/work");
    host::remove_tree(&place)?;
    let configuration = paths::lab_dir("bench")?.join("work.config");
    fs::write(&configuration, CONFIGURATION).context(|| format!("write {}", configuration.display()))?;
    let run = |program: &str, words: &[&Path]| {
        host::run("a place for a part of a kernel", "work-place", host::as_root(program).args(words))
    };
    run("mkdir", &[&place])?;
    run("cp", &[&configuration, &place.join("config")])?;
    let mut build = host::as_root("chroot");
    build.arg(kernels).args(["/bin/sh", "-c", PREPARE, "prepare", source, PART]);
    host::run("building what a part of a kernel needs", "work-build", &mut build)?;
    Ok(place.join("objects"))
}

/// A way's output about its work, or about the single operations.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Microseconds, by benchmark.
    pub costs: Vec<(String, f64)>,
    /// The hash of the built objects, which is the same for each way; `None` where nothing is
    /// built.
    pub objects: Option<String>,
}

/// Reads the output, among other text of a console.
///
/// # Errors
/// With the missing or failed part, or the failed transactions.
pub fn done(text: &str) -> Result<Done> {
    let after = |what: &str| {
        let rest = text.split_once(what).map(|(_, rest)| rest);
        rest.map(|rest| rest.split_whitespace().next().unwrap_or_default().to_owned())
            .ok_or_else(|| Error::Host(format!("the work has not said {what:?}: {text}")))
    };
    let number = |what: &str| {
        let word = after(what)?;
        word.parse::<f64>().map_err(|_| Error::Host(format!("{what:?} is no number: {word}")))
    };
    let failed = number("number of failed transactions: ")?;
    if failed > 0.0 {
        return Err(Error::Host(format!("{failed} transactions failed: {text}")));
    }
    let costs = [(POSTGRES, 1e6 / number("tps = ")?), (BUILD, number("elapsed_us ")?)];
    after("work done")?;
    let costs = costs.map(|(name, us)| (name.to_owned(), us)).to_vec();
    Ok(Done { costs, objects: Some(after("objects ")?) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SAID: &str = "[ 0.1] x\r\nnumber of failed transactions: 0 (0.000%)\r\ntps = 500.0 (without)\r\n\
                        elapsed_us 2500000\r\nobjects abc -\r\nwork done\r\n";

    #[test]
    fn output_of_the_work_is_parsed() {
        let done = done(SAID).unwrap();
        assert_eq!(done.costs, [(POSTGRES.to_owned(), 2000.0), (BUILD.to_owned(), 2_500_000.0)]);
        assert_eq!(done.objects.unwrap(), "abc");
    }

    #[test]
    fn work_that_is_not_done_is_an_error() {
        let said = |text: &str| done(text).unwrap_err().to_string();
        assert!(said(&SAID.replace("elapsed_us", "make: ***")).contains("elapsed_us"));
        assert!(said(&SAID.replace("transactions: 0", "transactions: 3")).contains("3 transactions failed"));
        assert!(said(&SAID.replace("work done", "")).contains("work done"));
    }
}
