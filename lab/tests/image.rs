//! What the hypervisor's machine code must not contain, read from the image that machines get.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::{collections::BTreeMap, path::PathBuf, process::Command, sync::LazyLock};

use mercury_lab::{driver::Variant, hypervisor};

/// Disassembly of each function by its symbol.
fn functions() -> BTreeMap<String, Vec<String>> {
    functions_of(Variant::Production)
}

/// The images, made once: while one is made anew nobody can read it.
static IMAGES: LazyLock<[PathBuf; 2]> =
    LazyLock::new(|| Variant::ALL.map(|variant| hypervisor::build(variant).unwrap()));

fn image(variant: Variant) -> &'static PathBuf {
    &IMAGES[usize::from(variant == Variant::Faults)]
}

fn functions_of(variant: Variant) -> BTreeMap<String, Vec<String>> {
    let elf = image(variant).with_extension("elf");
    let output = Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(&elf).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut functions = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_suffix(">:").and_then(|line| line.split_once('<')) {
            current = name.1.to_owned();
        } else if let Some((_, instruction)) = line.split_once(":\t") {
            functions.entry(current.clone()).or_insert_with(Vec::new).push(instruction.trim().to_owned());
        }
    }
    functions
}

fn named<'a>(functions: &'a BTreeMap<String, Vec<String>>, part: &str) -> &'a str {
    let mut names = functions.keys().filter(|name| name.contains(part));
    let name = names.next().unwrap_or_else(|| panic!("no function is called like {part}"));
    assert!(names.next().is_none(), "more than one function is called like {part}");
    name
}

/// A function and all that it calls by name.
fn reachable<'a>(functions: &'a BTreeMap<String, Vec<String>>, from: &'a str) -> Vec<&'a str> {
    let mut found = vec![from];
    let mut next = 0;
    while let Some(name) = found.get(next) {
        for instruction in &functions[*name] {
            let transfers = instruction.starts_with("call") || instruction.starts_with('j');
            let target = instruction.rsplit_once('<').map(|(_, target)| target.trim_end_matches('>'));
            let target = target.map(|target| target.split('+').next().unwrap_or(target));
            let Some((target, _)) = target.and_then(|target| functions.get_key_value(target)) else {
                continue;
            };
            // An exception's way out does not come back.
            if transfers && !found.contains(&target.as_str()) && !target.contains("emergency") {
                found.push(target);
            }
        }
        next += 1;
    }
    found
}

/// What runs while the vector registers are the system's: the answer to the driver's hypercalls, and what an
/// exception does before it goes on where it struck, which may be there.
const WITH_LIVE_VECTORS: &[&str] =
    &["3svm5quick10quick_exit", "3vmx5quick10quick_exit", "exceptions7recover"];

/// The world switch saves vector registers only for exits that are not hypercalls of the driver.
#[test]
fn live_vector_registers_are_not_used() {
    for functions in Variant::ALL.map(functions_of) {
        for from in WITH_LIVE_VECTORS {
            for name in reachable(&functions, named(&functions, from)) {
                let vector = functions[name].iter().find(|line| line.contains("mm"));
                assert_eq!(vector, None, "in {name}, from {from}");
            }
        }
    }
}

/// A panic is compiled code that runs before anybody could save vector registers. Builds with assertions do
/// have panics there.
#[test]
fn nothing_panics_with_live_vector_registers() {
    let functions = functions();
    for from in WITH_LIVE_VECTORS {
        let reachable = reachable(&functions, named(&functions, from));
        assert_eq!(reachable.iter().find(|name| name.contains("panic")), None, "from {from}");
    }
}

/// An exception that is the end of an attachment saves the vector registers, if nobody has, before compiled
/// code that may use them runs: the way out restores them.
#[test]
fn a_fatal_exception_saves_live_vector_registers() {
    for functions in Variant::ALL.map(functions_of) {
        let text = |part: &str| &functions[named(&functions, part)];
        let word = |part: &str, store: &str| -> String {
            let line = text(part).iter().find_map(|line| line.strip_prefix(store));
            line.unwrap_or_else(|| panic!("no {store} in {part}")).to_owned()
        };
        let saved = word("save_sse", "movl   $0x1,");
        assert_eq!(word("restore_sse", "movl   $0x0,"), saved);
        let common = text("exception_common");
        let at = |start: &str, part: &str| {
            let found = common.iter().position(|line| line.starts_with(start) && line.contains(part));
            found.unwrap_or_else(|| panic!("no {start} {part} in the handler"))
        };
        let order = [
            at("call", "exceptions7recover"),
            at("cmpl   $0x0,", &saved),
            at("jne", "exception_common"),
            at("call", "save_sse"),
            at("call", "exceptions5fatal"),
        ];
        assert!(order.is_sorted(), "{order:?}");
    }
}

/// A machine check may strike between any two instructions of the hypervisor, so an exit settles the one before
/// it in a single one.
#[test]
fn a_machine_check_is_settled_in_one_instruction() {
    let word = format!("{:#x}(", std::mem::offset_of!(mercury_abi::gate::GateBlock, machine_check));
    for functions in Variant::ALL.map(functions_of) {
        for exit in ["svm_exit", "vmx_exit"] {
            let lines = reachable(&functions, named(&functions, exit)).into_iter();
            let lines: Vec<_> = lines.flat_map(|name| &functions[name]).collect();
            let settled = lines.iter().any(|line| line.contains("cmpxchg") && line.contains(&word));
            let wiped = lines.iter().find(|line| {
                line.starts_with("movq   $0x0,") && line.contains(&word) && !line.contains("(%rsp)")
            });
            assert!(settled && wiped.is_none(), "{exit}: {wiped:?}");
        }
    }
}

/// IRET would unblock NMIs that the system has blocked (HARDWARE A-35).
#[test]
fn nothing_returns_by_iret() {
    let returns =
        functions().into_iter().find(|(_, lines)| lines.iter().any(|line| line.starts_with("iret")));
    assert_eq!(returns, None);
}

/// The hypervisor's IF holds interrupts back while GIF is 0 for KVM: it is set for a guest of KVM's alone.
#[test]
fn interrupts_are_let_in_for_guests_alone() {
    for functions in Variant::ALL.map(functions_of) {
        let lets_in = |line: &&String| line.split_whitespace().next() == Some("sti");
        let found: Vec<_> =
            functions.values().filter(|lines| lines.iter().any(|line| lets_in(&line))).collect();
        let [lines] = found[..] else { panic!("in {} functions", found.len()) };
        let at = lines.iter().position(|line| lets_in(&line)).unwrap();
        let next = ["xchg", "vmrun", "cli"];
        let around = lines[at + 1..].iter().zip(next).all(|(line, next)| line.starts_with(next));
        assert!(around && lines.iter().filter(lets_in).count() == 1, "{:?}", &lines[at..at + 4]);
    }
}

/// Instructions that begin with a V and have nothing to do with vectors.
const VIRTUALIZATION: [&str; 14] = [
    "vmrun", "vmload", "vmsave", "verr", "verw", "vmxon", "vmxoff", "vmclear", "vmptrld", "vmread",
    "vmwrite", "vmlaunch", "vmresume", "vmcall",
];

/// The upper halves of vector registers are the system's, always.
#[test]
fn nothing_touches_what_is_not_saved() {
    for (name, lines) in functions() {
        let wide = |line: &&String| {
            let mnemonic = line.split_whitespace().next().unwrap_or("");
            let vex = mnemonic.starts_with('v') && !VIRTUALIZATION.contains(&mnemonic);
            let x87 = mnemonic.starts_with('f');
            vex || x87 || line.contains("%ymm") || line.contains("%zmm") || line.contains("%mm")
        };
        assert_eq!(lines.iter().find(wide), None, "in {name}");
    }
}

/// What user mode can force is answered without a return and without an indirect branch (HARDWARE A-18):
/// from VMRUN to the next VMRUN.
#[test]
fn forced_exits_run_straight() {
    let functions = functions();
    let switch = &functions[named(&functions, "3svm3run6switch3run")];
    let start = switch.iter().position(|line| line.starts_with("vmrun")).unwrap();
    let back = switch[start..].iter().position(|line| line.starts_with("jmp")).unwrap();
    for line in &switch[start..=start + back] {
        assert!(!line.starts_with("ret") && !line.starts_with("call") && !line.contains('*'), "{line}");
    }
    assert!(back < 20, "{back} instructions");
    let beyond = &switch[start + back + 1..];
    assert_eq!(beyond.first().map(String::as_str), Some("lfence"), "nor speculatively any further");
}

/// The same on Intel, where CPUID is what everybody forces: from the exit to the next entry, what an NMI on the
/// way takes included.
#[test]
fn forced_exits_run_straight_on_intel() {
    let functions = functions();
    for part in ["3vmx3run6switch4exit", "3vmx3run6switch5enter"] {
        for line in &functions[named(&functions, part)] {
            assert!(!line.starts_with("ret") && !line.starts_with("call") && !line.contains('*'), "{line}");
        }
    }
    let exit = &functions[named(&functions, "3vmx3run6switch4exit")];
    let answered = exit.iter().position(|line| line.starts_with("jmp")).unwrap();
    assert!(answered < 60, "{answered} instructions");
    let beyond = &functions[named(&functions, "3vmx3run6switch4save")];
    assert_eq!(beyond.first().map(String::as_str), Some("lfence"), "nor speculatively any further");
}

/// The driver applies nothing else at load.
#[test]
fn relocations_are_relative() {
    let elf = image(Variant::Production).with_extension("elf");
    let output = Command::new("readelf").args(["-rW"]).arg(&elf).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let kinds: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    let kinds: Vec<&&str> = kinds.iter().filter(|kind| kind.starts_with("R_")).collect();
    assert!(!kinds.is_empty());
    assert!(kinds.iter().all(|kind| **kind == "R_X86_64_RELATIVE"), "{kinds:?}");
}

/// Small enough to be pre-cached on every machine: text, data and stand-in pages.
#[test]
fn image_is_small() {
    let image = std::fs::read(image(Variant::Production)).unwrap();
    assert!(image.len() < 168 << 10, "{} bytes", image.len());
}
