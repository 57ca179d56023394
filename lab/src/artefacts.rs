//! The artefacts that the project gives its machines: the agent, the `mercury` command and the
//! kernel modules. They are built from the sources and carried into the machine on a read-only disk
//! of its own.
//!
//! ```text
//! /mercury/bin       first in the search path: mercury, mercury-guest, mercury-workload, the agent,
//! poweroff, scripts /mercury/lib       what those need /mercury/share     the manual pages of mercury, and
//! its completion for bash /mercury/lib/modules/<kernel version>/mercury.ko          and modules-faults/
//! beside it /mercury/lib/modules/<kernel version>/mercury_test.ko     and others, see lab/testmod
//! /mercury/initramfs/<kernel version>.cpio                  for kexec
//! ```

use std::{
    env, fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::{
    driver::{self, For, Variant},
    error::{Context, Result},
    hash::Ingredients,
    host, hypervisor, image,
    image::Release,
    kernel::Kernel,
    lock::Lock,
    paths, previrtualization, spec, testmod,
};

/// The artefacts for the machines of one release.
#[derive(Clone, Debug)]
pub struct Artefacts {
    /// The agent's program, statically linked.
    pub agent: PathBuf,
    /// The read-only disk, for machines of one release.
    pub disk: PathBuf,
}

const SCRIPTS: &[(&str, &str)] = &[
    ("bin/lab-postgres", include_str!("../guest/lab-postgres")),
    ("lib/lab-network", include_str!("../guest/lab-network")),
    ("lib/lab-nfs-root", include_str!("../guest/lab-nfs-root")),
    ("lib/lab-own-kernel", include_str!("../guest/lab-own-kernel")),
    ("lib/lab-own-artefacts", include_str!("../guest/lab-own-artefacts")),
    ("lib/lab-ram-root", include_str!("../guest/lab-ram-root")),
    ("lib/lab-small-root", include_str!("../guest/lab-small-root")),
    ("lib/lab-mapped-root", include_str!("../guest/lab-mapped-root")),
    ("lib/bashrc", include_str!("../guest/bashrc")),
    ("lib/welcome", include_str!("../guest/welcome")),
];

/// Builds the artefacts for machines of `release`, at most once in a process.
///
/// # Errors
/// If something does not build; the error names the log.
pub fn ensure(release: Release) -> Result<Artefacts> {
    static BUILT: [Mutex<Option<Artefacts>>; Release::ALL.len()] = [const { Mutex::new(None) }; _];
    let mut built = BUILT[release as usize].lock().unwrap_or_else(PoisonError::into_inner);
    match &*built {
        Some(artefacts) => Ok(artefacts.clone()),
        None => Ok(built.insert(build(release)?).clone()),
    }
}

fn build(release: Release) -> Result<Artefacts> {
    let _lock = Lock::wait(&format!("artefacts-{release}"))?;
    let (agent, mut files) = build_programs()?;
    for kernel in Kernel::ALL.into_iter().filter(|kernel| kernel.release() == release) {
        let version = kernel.files(&image::Image::ensure(release)?)?;
        files.push((format!("initramfs/{}.cpio", version.version).into(), version.initramfs(&agent)?));
        add_modules(&For::stock(kernel)?, &mut files)?;
    }
    if let Some(flavour) = spec::checks(release)? {
        let kernel = For::checked(release, flavour)?;
        add_modules(&kernel, &mut files)?;
        let name = Path::new("lib/modules").join(&kernel.version);
        let built = previrtualization::build(release, flavour)?;
        files.extend(BUILT_IN.map(|file| (name.join(file), built.directory.join(file))));
        files.push((format!("boot/vmlinuz-{}", kernel.version).into(), built.image));
    }
    Ok(Artefacts { agent, disk: make_disk(release, &files)? })
}

/// Files of a kernel's build by which modprobe knows the modules that are built in.
const BUILT_IN: [&str; 3] = ["modules.builtin", "modules.builtin.modinfo", "modules.order"];

/// Adds the driver, and the modules of the tests, for one kernel.
fn add_modules(kernel: &For, files: &mut Files) -> Result<()> {
    for (variant, module) in build_modules_for(kernel)? {
        let name = Path::new("lib").join(variant.directory()).join(&kernel.version);
        files.push((name.join("mercury.ko"), module));
    }
    let (name, built) = (Path::new("lib/modules").join(&kernel.version), testmod::build(kernel)?);
    files.extend(testmod::FILES.map(|file| (name.join(file), built.join(file))));
    Ok(())
}

/// The contents of a disk: each place with the file that goes there.
type Files = Vec<(PathBuf, PathBuf)>;

/// Builds the agent and all programs, at most once in a process. Returns the agent and the
/// programs' places on the disk.
fn build_programs() -> Result<(PathBuf, Files)> {
    static BUILT: Mutex<Option<(PathBuf, Files)>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(programs) = &*built {
        return Ok(programs.clone());
    }
    let agent = build_agent()?;
    let mercury = build_program("mercury-cli", "mercury")?;
    let mut files = vec![
        (PathBuf::from("bin/mercury-lab-agent"), agent.clone()),
        (PathBuf::from("bin/mercury"), mercury.clone()),
        (PathBuf::from("bin/mercury-guest"), build_program("mercury-guest-command", GUEST)?),
        (PathBuf::from("bin/mercury-workload"), build_program("mercury-lab-workload", "mercury-workload")?),
    ];
    files.extend(generate_help(&mercury)?);
    Ok(built.insert((agent, files)).clone())
}

/// Writes the manual pages and the bash completion of the command, as its package does, and returns their
/// places on the disk. The folder is named by the program: test programs for another release may read it at
/// the same time.
fn generate_help(mercury: &Path) -> Result<Files> {
    let name = Ingredients::default().with_path(mercury)?.name();
    let share = paths::lab_dir("share")?.join(&name);
    let _lock = Lock::wait("share")?;
    if !share.exists() {
        let unfinished = share.with_extension("unfinished");
        host::remove_tree(&unfinished)?;
        for (what, folder) in [("man", "man/man8"), ("completions", "completions")] {
            let mut generate = Command::new(mercury);
            generate.args(["generate", what]).arg(unfinished.join(folder));
            host::run("writing the manual pages", "generate", &mut generate)?;
        }
        fs::rename(&unfinished, &share).context(|| format!("name {}", share.display()))?;
    }
    let pages = share.join("man/man8");
    let entries = fs::read_dir(&pages).context(|| format!("list {}", pages.display()))?;
    let mut files: Files = entries
        .flatten()
        .map(|page| (Path::new("share/man/man8").join(page.file_name()), page.path()))
        .collect();
    files.sort();
    files.push(("share/mercury.bash".into(), share.join("completions/mercury.bash")));
    Ok(files)
}

/// Builds the driver's module in both variants, or nothing if there is no driver in the sources.
///
/// # Errors
/// If one does not build.
pub fn build_modules(kernel: Kernel) -> Result<Vec<(Variant, PathBuf)>> {
    build_modules_for(&For::stock(kernel)?)
}

fn build_modules_for(kernel: &For) -> Result<Vec<(Variant, PathBuf)>> {
    if !driver::exists() {
        return Ok(Vec::new());
    }
    Variant::ALL
        .into_iter()
        .map(|variant| {
            let image = hypervisor::build(variant)?;
            Ok((variant, driver::build(kernel, variant, &image)?))
        })
        .collect()
}

/// Builds the agent, statically linked. The agent is also the first program of an initramfs, where
/// there are no libraries. A target directory of its own keeps this flag from rebuilding everything
/// else.
fn build_agent() -> Result<PathBuf> {
    let target = paths::lab_dir("agent")?;
    let mut cargo = cargo();
    cargo.args(["build", "--release", "-p", "mercury-lab-agent", "--target", "x86_64-unknown-linux-gnu"]);
    cargo.arg("--target-dir").arg(&target);
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    host::run("building the agent", "build-agent", &mut cargo)?;
    Ok(target.join("x86_64-unknown-linux-gnu/release/mercury-lab-agent"))
}

/// Builds a program of the workspace in the release profile.
///
/// # Errors
/// If the program does not build; the error names the log.
pub fn build_program(package: &str, name: &str) -> Result<PathBuf> {
    let mut cargo = cargo();
    cargo.args(["build", "--release", "-p", package, "--bin", name]);
    host::run(&format!("building {name}"), &format!("build-{name}"), &mut cargo)?;
    Ok(paths::root().join("target/release").join(name))
}

/// The program that `mercury hosted` executes, beside it.
pub const HOSTED: &str = "mercury-hosted";

/// The program that `mercury restore --as-guest` executes, beside it.
pub const GUEST: &str = "mercury-guest";

/// Builds `mercury-hosted`, and `mercury` beside it, which executes it. Returns the path of `mercury`.
///
/// # Errors
/// If one of them does not build; the error names the log.
pub fn build_hosted() -> Result<PathBuf> {
    build_program("mercury-hosted-command", HOSTED)?;
    build_program("mercury-cli", "mercury")
}

/// Returns the cargo that started this program, or the one in the search path. The command runs in
/// the project's root, without the variables that the outer cargo has set for its children.
#[must_use]
pub fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(paths::root()).env_remove("CARGO_TARGET_DIR");
    for (key, _) in env::vars_os() {
        let inherited = key.to_string_lossy().starts_with("CARGO_PKG_");
        if inherited || key == "CARGO_MANIFEST_DIR" {
            cargo.env_remove(key);
        }
    }
    cargo
}

/// Puts files on a disk. The disk's name is the hash of its contents. Machines that run so keep
/// their disk when the next one is made.
fn make_disk(release: Release, files: &[(PathBuf, PathBuf)]) -> Result<PathBuf> {
    let mut all = Ingredients::default();
    for (name, file) in files {
        all = all.with(name.as_os_str().as_encoded_bytes()).with_path(file)?;
    }
    for (name, text) in SCRIPTS {
        all = all.with(name).with(text);
    }
    let directory = paths::lab_dir("disks")?;
    let disk = directory.join(format!("{release}-{}.img", all.name()));
    if !disk.exists() {
        let stage = directory.join(format!("{release}-stage"));
        fill(&stage, files)?;
        let unfinished = disk.with_extension("new");
        image::make_disk("artefacts' disk", &stage, &unfinished, "mercury-lab", &disk_size(files))?;
        remove_older(&directory, release)?;
        fs::rename(&unfinished, &disk).context(|| "name the artefacts' disk".into())?;
    }
    Ok(disk)
}

/// Returns the size of a disk: room for the files, for the file system's own structures, and some
/// spare.
fn disk_size(files: &[(PathBuf, PathBuf)]) -> String {
    let bytes: u64 = files.iter().filter_map(|(_, file)| file.metadata().ok()).map(|meta| meta.len()).sum();
    format!("{}M", 16 + bytes * 5 / 4 / (1 << 20))
}

fn fill(stage: &Path, files: &[(PathBuf, PathBuf)]) -> Result<()> {
    host::remove_tree(stage)?;
    for (name, file) in files {
        let to = place(stage, name)?;
        fs::copy(file, &to).context(|| format!("copy {}", file.display()))?;
    }
    for (name, text) in SCRIPTS {
        let to = place(stage, Path::new(name))?;
        fs::write(&to, text).context(|| format!("write {}", to.display()))?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&to, executable).context(|| format!("mark {}", to.display()))?;
    }
    for name in ["poweroff", "reboot", "halt"] {
        let link = stage.join("bin").join(name);
        symlink("mercury-lab-agent", &link).context(|| format!("make {}", link.display()))?;
    }
    Ok(())
}

fn place(stage: &Path, name: &Path) -> Result<PathBuf> {
    let to = stage.join(name);
    let directory = to.parent().unwrap_or(stage);
    fs::create_dir_all(directory).context(|| format!("make {}", directory.display()))?;
    Ok(to)
}

/// The time for which an old disk is kept. A test run that began earlier may be about to boot from
/// it.
const KEPT_FOR: Duration = Duration::from_secs(3 * 3600);

fn remove_older(directory: &Path, release: Release) -> Result<()> {
    let entries = fs::read_dir(directory).context(|| "list the artefacts' disks".into())?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let age = entry.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed());
        let old = age.is_ok_and(|age| age.is_ok_and(|age| age > KEPT_FOR));
        if old && name.starts_with(&format!("{release}-")) && name.ends_with(".img") {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}
