//! Builds the hypervisor's flat image, which the module embeds.
//!
//! It is a freestanding program for the ordinary target: no unwinding, no red zone, position-independent
//! with relative relocations only (hypervisor/link.ld says the rest), in target directories of its own so
//! that its flags disturb nothing else.

use std::path::PathBuf;

use crate::{artefacts, driver::Variant, error::Result, host, paths};

/// What the compiler must know beyond the profile: interrupts may strike below the stack pointer in
/// root mode, the program is a position-independent one without an interpreter, and what user mode can
/// reach has no indirect branches.
const FLAGS: &str = "-C no-redzone=y -C relocation-model=pic -C jump-tables=no -C target-feature=+crt-static";
const TARGET: &str = "x86_64-unknown-linux-gnu";
const NAME: &str = "mercury-hypervisor";

/// Builds the image of a variant; cargo knows whether there is anything to do. Beside it stands the ELF
/// with symbols, for debuggers: the same name with `.elf`.
///
/// # Errors
/// If it does not build; the error names the log.
pub fn build(variant: Variant) -> Result<PathBuf> {
    let (name, features) = match variant {
        Variant::Production => ("hypervisor", "image"),
        Variant::Faults => ("hypervisor-faults", "image,fault-injection"),
    };
    let directory = paths::lab_dir("hypervisor")?;
    let target = directory.join(format!("{name}-target"));
    let mut cargo = artefacts::cargo();
    cargo.args(["build", "-p", NAME, "--bin", NAME, "--features", features]);
    cargo.args(["--profile", "hypervisor", "--target", TARGET, "--target-dir"]).arg(&target);
    cargo.env("RUSTFLAGS", FLAGS);
    if variant == Variant::Faults {
        cargo.env("CARGO_PROFILE_HYPERVISOR_DEBUG_ASSERTIONS", "true");
    }
    host::run(&format!("building the {name}"), &format!("build-{name}"), &mut cargo)?;

    let elf = target.join(TARGET).join("hypervisor").join(NAME);
    let image = directory.join(format!("{name}.bin"));
    let mut flatten = std::process::Command::new("objcopy");
    flatten.args(["-O", "binary"]).arg(&elf).arg(&image);
    host::run(&format!("flattening the {name}"), &format!("flatten-{name}"), &mut flatten)?;
    let mut symbols = std::process::Command::new("cp");
    symbols.arg(&elf).arg(image.with_extension("elf"));
    host::run(&format!("keeping the {name}'s symbols"), &format!("symbols-{name}"), &mut symbols)?;
    Ok(image)
}
