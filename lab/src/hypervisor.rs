//! The build of the hypervisor's flat image, which the module embeds.
//!
//! The image is a freestanding program for the ordinary target: no unwinding, no red zone,
//! position-independent with relative relocations only (switch/hypervisor/link.ld says the rest).
//! Target directories of its own keep its flags from rebuilding anything else.

use std::{fs, path::PathBuf, process::Command};

use crate::{
    artefacts,
    driver::Variant,
    error::{Context, Result},
    host,
    lock::Lock,
    paths,
};

/// The compiler's flags beyond the profile:
///
/// - No red zone: interrupts may strike below the stack pointer in root mode.
/// - A position-independent program without an interpreter.
/// - No indirect branches in code that user mode can reach. Hence no jump tables, and no calls
///   through a table of addresses, which the compiler makes for memcpy and the like where
///   relocations are read-only.
const FLAGS: &str = "-C no-redzone=y -C relocation-model=pic -C jump-tables=no -C relro-level=off \
    -C target-feature=+crt-static";
const TARGET: &str = "x86_64-unknown-linux-gnu";
const NAME: &str = "mercury-hypervisor";

const fn name(variant: Variant) -> &'static str {
    match variant {
        Variant::Production => "hypervisor",
        Variant::Faults => "hypervisor-faults",
    }
}

/// Directs a cargo command at the image of a variant, in a target directory of its own.
fn freestanding(cargo: &mut Command, variant: Variant) -> Result<PathBuf> {
    let features = match variant {
        Variant::Production => "image",
        Variant::Faults => "image,fault-injection",
    };
    let target = paths::lab_dir("hypervisor")?.join(format!("{}-target", name(variant)));
    cargo.args(["-p", NAME, "--bin", NAME, "--features", features]);
    cargo.args(["--profile", "hypervisor", "--target", TARGET, "--target-dir"]).arg(&target);
    cargo.env("RUSTFLAGS", FLAGS);
    if variant == Variant::Faults {
        cargo.env("CARGO_PROFILE_HYPERVISOR_DEBUG_ASSERTIONS", "true");
    }
    Ok(target)
}

/// Returns the command that lints the image's own code, and the shared code as the image has it.
///
/// # Errors
/// If the target directory cannot be made.
pub fn lints(variant: Variant) -> Result<Command> {
    let mut cargo = artefacts::cargo();
    cargo.args(["clippy", "-q", "--lib"]);
    freestanding(&mut cargo, variant)?;
    cargo.args(["--", "-D", "warnings"]);
    Ok(cargo)
}

/// Builds the image of a variant; cargo knows if a build is needed. The ELF file with symbols, for
/// debuggers, stands beside the image under the same name with `.elf`.
///
/// # Errors
/// If the image does not build; the error names the log.
pub fn build(variant: Variant) -> Result<PathBuf> {
    let name = name(variant);
    let _lock = Lock::wait(name)?;
    let mut cargo = artefacts::cargo();
    cargo.arg("build");
    let target = freestanding(&mut cargo, variant)?;
    let directory = paths::lab_dir("hypervisor")?;
    host::run(&format!("building the {name}"), &format!("build-{name}"), &mut cargo)?;

    let elf = target.join(TARGET).join("hypervisor").join(NAME);
    let image = directory.join(format!("{name}.bin"));
    let mut flatten = Command::new("objcopy");
    // No reader meets a half-written image.
    let unfinished = image.with_extension("new");
    flatten.args(["-O", "binary"]).arg(&elf).arg(&unfinished);
    host::run(&format!("flattening the {name}"), &format!("flatten-{name}"), &mut flatten)?;
    fs::rename(&unfinished, &image).context(|| format!("name the {name}"))?;
    fs::copy(&elf, &unfinished).context(|| format!("keep the {name}'s symbols"))?;
    fs::rename(&unfinished, image.with_extension("elf")).context(|| format!("name the {name}'s symbols"))?;
    Ok(image)
}
