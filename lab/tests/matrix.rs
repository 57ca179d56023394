//! The machines that Mercury is for, and those that it refuses. Doctor predicts the answer of
//! attach.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use mercury_lab::{Kernel, Machine, Result, Spec};
use serde_json::Value;

fn plain() -> Spec {
    Spec::new(Kernel::BookwormCloud)
}

fn trixie() -> Spec {
    Spec::new(Kernel::TrixieCloud)
}

/// Checks that doctor allows the machine, attach and detach work under load, and nothing remains.
fn works(spec: Spec) -> Result<()> {
    let machine = Machine::boot(spec)?;
    let doctor = machine.mercury("doctor")?;
    assert_eq!(doctor["can_attach"], "yes", "{doctor:#}");
    machine.mercury("load")?;
    let work = machine.start_work()?;
    machine.mercury("attach")?;
    let modes = machine.modes()?;
    assert!(!modes.is_empty() && !modes.contains("native"), "{modes}");
    machine.mercury("detach")?;
    machine
        .command("mercury-workload switch --cycles 20")
        .timeout(Duration::from_secs(240))
        .run()?
        .check()?;
    machine.mercury("verify")?;
    machine.check_next_attach()?;
    work.finish()
}

/// Checks that doctor forbids the machine, and attach refuses with a code that doctor has named.
fn refuses(spec: Spec, code: &str) -> Result<()> {
    let machine = Machine::boot(spec)?;
    let doctor = machine.run("mercury --json doctor")?;
    let said: Value = serde_json::from_str(&doctor.stdout).unwrap();
    assert_eq!((doctor.code(), &said["can_attach"]), (Some(3), &"no".into()), "{said:#}");
    let named = |item: &&Value| item["grade"] == "refused" && item["code"] == code;
    assert!(said["items"].as_array().unwrap().iter().any(|item| named(&item)), "{said:#}");
    let refusal = machine.mercury_refused("attach")?;
    assert_eq!((refusal.exit, refusal.code.as_str()), (3, code), "{refusal:?}");
    machine.check_health()
}

macro_rules! rows {
    ($how:ident: $($(#[$mark:meta])* $name:ident = $($argument:expr),+;)*) => {
        $(#[test] $(#[$mark])* fn $name() -> Result<()> { $how($($argument),+) })*
    };
}

rows! { works:
    #[ignore = "long"]
    kernel_6_1_cloud = plain();
    #[ignore = "long"]
    kernel_6_1_generic = Spec::new(Kernel::BookwormGeneric);
    #[ignore = "long"]
    kernel_6_12_cloud = trixie();
    kernel_6_12_generic = Spec::new(Kernel::TrixieGeneric);

    #[ignore = "long"]
    cpus_1_on_6_1 = plain().cpus(1);
    #[ignore = "long"]
    cpus_4_on_6_1 = plain().cpus(4);
    cpus_8_on_6_1 = plain().cpus(8);
    #[ignore = "long"]
    cpus_1_on_6_12 = trixie().cpus(1);
    #[ignore = "long"]
    cpus_8_on_6_12 = trixie().cpus(8);

    #[ignore = "long"]
    memory_512_mib_on_6_1 = plain().memory_mib(512);
    #[ignore = "long"]
    memory_512_mib_on_6_12 = trixie().memory_mib(512);
    #[ignore = "long"]
    memory_4_gib = plain().memory_mib(4096);
    #[ignore = "long"]
    memory_8_gib = plain().memory_mib(8192);
    #[ignore = "long"]
    memory_16_gib_on_6_1 = plain().memory_mib(16384);
    #[ignore = "long"]
    memory_16_gib_on_6_12 = trixie().memory_mib(16384);

    #[ignore = "long"]
    no_1_gib_pages = plain().cpu_feature("-pdpe1gb");
    no_1_gib_pages_and_16_gib = plain().cpu_feature("-pdpe1gb").memory_mib(16384);
    five_levels_on_6_1 = plain().cpu_feature("+la57");
    #[ignore = "long"]
    five_levels_on_6_12 = trixie().cpu_feature("+la57");
    #[ignore = "long"]
    five_levels_and_no_1_gib_pages = plain().cpu_feature("+la57").cpu_feature("-pdpe1gb");
    uefi = trixie().uefi();
    #[ignore = "long"]
    epyc_rome = plain().cpu("EPYC-Rome,+svm,+npt");
    #[ignore = "long"]
    epyc_milan = trixie().cpu("EPYC-Milan,+svm,+npt");
    #[ignore = "long"]
    addresses_of_48_bits = plain().phys_bits(48);
    #[ignore = "long"]
    addresses_of_48_bits_and_no_1_gib_pages = trixie().phys_bits(48).cpu_feature("-pdpe1gb");
}

rows! { refuses:
    no_svm = plain().cpu("EPYC,-svm"), "no-svm";
    no_nested_paging = plain().cpu("EPYC,+svm,-npt"), "no-nested-paging";
    #[ignore = "long"]
    an_old_family = plain().cpu("EPYC,+svm,+npt,family=22,model=48"), "family-unsupported";
    #[ignore = "long"]
    intel_without_vmx = plain().cpu("Skylake-Client"), "no-vmx";
    #[ignore = "long"]
    isolated_page_tables = plain().kernel_arg("pti=on"), "page-table-isolation";
    lockdown_on_6_1 = plain().kernel_arg("lockdown=integrity"), "lockdown";
    #[ignore = "long"]
    unsigned_modules_on_6_12 = trixie().kernel_arg("module.sig_enforce=1"), "lockdown";
}
