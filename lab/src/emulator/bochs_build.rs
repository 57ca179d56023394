//! The build of Bochs 3 without a screen, from Debian 13's source package with this host's
//! compiler. Its BIOS, isolinux and xorriso come out of Debian's packages and run with their own
//! libraries. The lab keeps all of it under `target/lab/tools/` by the hash of its recipe.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    apt::{self, Packages},
    error::{Context, Error, Result},
    hash::Ingredients,
    host,
    lock::Lock,
    paths,
};

const SOURCE: &str = "bochs";
const TOOLS: Packages = Packages {
    release: "trixie",
    backports: false,
    names: "bochsbios,vgabios,isolinux,syslinux-common,xorriso",
};

/// The options of Bochs's build. The lab's processors need AVX-512; the other options add speed, or
/// leave parts out for it.
const CONFIGURE: &[&str] = &[
    "--with-nogui",
    "--disable-docbook",
    "--enable-all-optimizations",
    "--enable-cpu-level=6",
    "--enable-x86-64",
    "--enable-smp",
    "--enable-svm",
    "--enable-vmx=2",
    "--enable-avx",
    "--enable-evex",
    "--enable-cet",
    "--enable-protection-keys",
    "--enable-memtype",
    "--enable-monitor-mwait",
    "--enable-perfmon",
    "--enable-pci",
];

/// An installed Bochs.
#[derive(Debug)]
pub struct Bochs {
    dir: PathBuf,
}

impl Bochs {
    /// Returns the emulator's program.
    #[must_use]
    pub fn program(&self) -> PathBuf {
        self.dir.join("bochs")
    }

    /// Returns the firmware that Bochs is meant to run with.
    #[must_use]
    pub fn bios(&self) -> PathBuf {
        self.dir.join("tree/usr/share/bochs/BIOS-bochs-latest")
    }

    /// Returns the firmware of a screen. Boot loaders need one, though no person sees it.
    #[must_use]
    pub fn vga_bios(&self) -> PathBuf {
        self.dir.join("tree/usr/share/vgabios/vgabios.bin")
    }

    /// Returns the boot loader's files and their names on a disc.
    #[must_use]
    pub fn boot_loader(&self) -> [(PathBuf, &'static str); 2] {
        let tree = self.dir.join("tree/usr/lib");
        [
            (tree.join("ISOLINUX/isolinux.bin"), "isolinux.bin"),
            (tree.join("syslinux/modules/bios/ldlinux.c32"), "ldlinux.c32"),
        ]
    }

    /// Returns the program that makes discs.
    #[must_use]
    pub fn xorriso(&self) -> Command {
        let library = self.dir.join("tree/usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(library.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&library).arg(self.dir.join("tree/usr/bin/xorriso"));
        command
    }
}

/// Builds Bochs if it is missing, in three minutes on two processors.
///
/// # Errors
/// If Bochs cannot be built; the error names the log.
pub fn ensure() -> Result<Bochs> {
    let dir = paths::lab_dir("tools")?.join(format!("bochs-{}", recipe()));
    if !dir.exists() {
        let _lock = Lock::wait("bochs")?;
        if !dir.exists() {
            make(&dir)?;
        }
    }
    Ok(Bochs { dir })
}

fn recipe() -> String {
    Ingredients::default().with(SOURCE).with(format!("{TOOLS:?}")).with(CONFIGURE.join(" ")).name()
}

fn make(dir: &Path) -> Result<()> {
    let new = dir.with_extension("new");
    host::remove_tree(&new)?;
    fs::create_dir_all(&new).context(|| format!("make {}", new.display()))?;
    TOOLS.extract("Bochs's BIOS and boot loader from Debian's packages", "bochs-tools", &new.join("tree"))?;
    let archive = apt::fetch_source(TOOLS.release, SOURCE, &new.join("source"))?;
    build(&archive, &new)?;
    host::remove_tree(&new.join("build"))?;
    host::remove_tree(&new.join("source"))?;
    fs::rename(&new, dir).context(|| "name Bochs".into())
}

fn build(archive: &Path, new: &Path) -> Result<()> {
    let build = new.join("build");
    fs::create_dir(&build).context(|| "make a directory to build Bochs in".into())?;
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(archive).arg("--strip-components=1").arg("-C").arg(&build);
    host::run("unpacking Bochs", "bochs-unpack", &mut tar)?;
    let mut configure = Command::new("./configure");
    configure.args(CONFIGURE).current_dir(&build).env("CXXFLAGS", "-O2").env("CFLAGS", "-O2");
    host::run("configuring Bochs", "bochs-configure", &mut configure)?;
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let mut make = Command::new("make");
    make.arg(format!("-j{threads}")).arg("bochs").current_dir(&build);
    host::run("building Bochs", "bochs-make", &mut make)?;
    let program = build.join("bochs");
    if !program.exists() {
        return Err(Error::Host("the build of Bochs left no program".into()));
    }
    fs::copy(program, new.join("bochs")).context(|| "install Bochs".into()).map(drop)
}
