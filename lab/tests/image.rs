//! Instructions that the hypervisor's machine code must not contain, checked in the image that
//! machines get.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use mercury_lab::{
    Kernel,
    driver::{self, For, Variant},
    hypervisor,
};

/// Returns the disassembly of each function by its symbol.
fn functions() -> BTreeMap<String, Vec<String>> {
    functions_of(Variant::Production)
}

/// The images, made once, since no test can read an image while it is made anew.
static IMAGES: LazyLock<[PathBuf; 2]> =
    LazyLock::new(|| Variant::ALL.map(|variant| hypervisor::build(variant).unwrap()));

fn image(variant: Variant) -> &'static PathBuf {
    &IMAGES[usize::from(variant == Variant::Faults)]
}

fn functions_of(variant: Variant) -> BTreeMap<String, Vec<String>> {
    disassembled(&image(variant).with_extension("elf"))
}

fn disassembled(file: &Path) -> BTreeMap<String, Vec<String>> {
    let output = Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(file).output().unwrap();
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

/// Returns a function and all functions that it calls by name.
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
            // The exit path of an exception does not return.
            if transfers && !found.contains(&target.as_str()) && !target.contains("emergency") {
                found.push(target);
            }
        }
        next += 1;
    }
    found
}

/// Functions that run while the vector registers are the system's: the answer to the driver's
/// hypercalls, and the part of an exception before it goes on at the interrupted instruction, which
/// may be in such code.
const WITH_LIVE_VECTORS: &[&str] =
    &["3svm5quick10quick_exit", "3vmx5quick10quick_exit", "exceptions7recover"];

/// Uses no live vector register. The world switch saves vector registers only for exits that are
/// not hypercalls of the driver.
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

/// Panics nowhere with live vector registers: a panic is compiled code that runs before the
/// registers could be saved. Builds with assertions do have panics there.
#[test]
fn nothing_panics_with_live_vector_registers() {
    let functions = functions();
    for from in WITH_LIVE_VECTORS {
        let reachable = reachable(&functions, named(&functions, from));
        assert_eq!(reachable.iter().find(|name| name.contains("panic")), None, "from {from}");
    }
}

/// Saves the vector registers in an exception that ends an attachment, unless they are saved
/// already, before compiled code that may use them runs. The exit path restores them.
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

/// Settles an earlier exit in a single instruction, since a machine check may strike between any
/// two instructions of the hypervisor.
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

/// Returns nowhere by IRET, which would unblock NMIs that the system has blocked (HARDWARE A-35).
#[test]
fn nothing_returns_by_iret() {
    let returns =
        functions().into_iter().find(|(_, lines)| lines.iter().any(|line| line.starts_with("iret")));
    assert_eq!(returns, None);
}

/// Sets the hypervisor's IF only for a guest of KVM's. While GIF is 0 for KVM, the clear IF holds
/// interrupts back.
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

/// Instructions that begin with a V and are no vector instructions.
const VIRTUALIZATION: [&str; 14] = [
    "vmrun", "vmload", "vmsave", "verr", "verw", "vmxon", "vmxoff", "vmclear", "vmptrld", "vmread",
    "vmwrite", "vmlaunch", "vmresume", "vmcall",
];

/// Never touches the upper halves of vector registers, which are always the system's.
#[test]
fn unsaved_vector_registers_are_not_used() {
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

/// The machine code by address.
struct Code {
    at: BTreeMap<u64, String>,
    starts: BTreeMap<String, u64>,
}

impl Code {
    fn of(variant: Variant) -> Self {
        let elf = image(variant).with_extension("elf");
        let output = Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(&elf).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let number = |text: &str| u64::from_str_radix(text.trim(), 16).unwrap();
        let (mut at, mut starts) = (BTreeMap::new(), BTreeMap::new());
        for line in text.lines() {
            if let Some((address, name)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
                starts.insert(name.to_owned(), number(address));
            } else if let Some((address, instruction)) = line.split_once(":\t") {
                at.insert(number(address), instruction.trim().to_owned());
            }
        }
        Self { at, starts }
    }

    fn start(&self, part: &str) -> u64 {
        let mut found = self.starts.iter().filter(|(name, _)| name.contains(part));
        let (_, start) = found.next().unwrap_or_else(|| panic!("no function is called like {part}"));
        assert!(found.next().is_none(), "more than one function is called like {part}");
        *start
    }

    fn after(&self, address: u64) -> u64 {
        *self.at.range(address + 1..).next().unwrap().0
    }

    /// Returns the instructions from an address on, as they lie in memory.
    fn from(&self, address: u64) -> impl Iterator<Item = (u64, &str)> {
        self.at.range(address..).map(|(address, text)| (*address, text.as_str()))
    }

    /// Returns the target of a call that only fills the return predictor: the target is after a
    /// breakpoint.
    fn fills(&self, address: u64) -> Option<u64> {
        let trap = self.after(address);
        let behind = self.after(trap);
        let calls = self.at[&address].starts_with("call") && self.at[&trap] == "int3";
        (calls && target(&self.at[&address]) == Some(behind)).then_some(behind)
    }

    /// Returns the addresses at which execution can go on after this instruction. The instruction
    /// must be no return, no indirect branch, and no call but one that fills the predictor.
    fn next(&self, address: u64) -> Vec<u64> {
        let text = self.at[&address].as_str();
        assert!(
            !text.starts_with("ret") && !text.starts_with("iret") && !text.contains('*'),
            "{address:x}: {text}"
        );
        if text.starts_with("call") {
            return vec![self.fills(address).unwrap_or_else(|| panic!("{address:x}: {text}"))];
        }
        let taken = || target(text).unwrap_or_else(|| panic!("{address:x}: {text}"));
        match text {
            jump if jump.starts_with("jmp") => vec![taken()],
            jump if jump.starts_with('j') => vec![self.after(address), taken()],
            _ => vec![self.after(address)],
        }
    }

    /// Returns all addresses that can be reached from here without passing an instruction that is
    /// the `end` of a way.
    fn ways(&self, from: u64, end: impl Fn(u64) -> bool) -> (BTreeSet<u64>, BTreeSet<u64>) {
        let (mut found, mut ends, mut open) = (BTreeSet::new(), BTreeSet::new(), vec![from]);
        while let Some(address) = open.pop() {
            if end(address) {
                ends.insert(address);
            } else if found.insert(address) {
                open.extend(self.next(address));
            }
        }
        (found, ends)
    }

    /// Returns true if this instruction asks whether compiled code may map the system's memory. If
    /// not, the code after it waits until the answer is certain.
    fn asks(&self, address: u64) -> bool {
        let mut lines = self.from(address).map(|(_, text)| text);
        let question =
            lines.next().is_some_and(|line| line.starts_with("cmpl   $0x0,") && line.ends_with("(%rdi)"));
        question && lines.next().is_some_and(|line| line.starts_with("jne")) && lines.next() == Some("lfence")
    }

    /// Checks that an exit whose first instructions are at `from` runs without calls, returns and
    /// indirect branches until it enters the guest again by one of `entries`, or has asked. Checks
    /// also that predictions are discarded before the first call of an exit that may map memory.
    /// Returns the question.
    fn check_exit(&self, from: u64, entries: &[&str]) -> &str {
        let enters = |address: u64| entries.contains(&self.at[&address].as_str());
        let (_, ends) = self.ways(from, |address| enters(address) || self.asks(address));
        let mut questions = ends.iter().copied().filter(|end| self.asks(*end));
        let question = questions.next().expect("one question");
        assert_eq!(questions.next(), None, "one place");
        assert_eq!(ends.iter().any(|end| enters(*end)), !entries.is_empty(), "some are answered here");
        let callee = target(&self.at[&self.after(question)]).unwrap();
        let (forgets, fences) = self.ways(callee, |address| self.at[&address] == "lfence");
        assert_eq!(fences.len(), 1, "all ways end in one");
        let fills = forgets.iter().filter(|address| self.fills(**address).is_some()).count();
        assert_eq!(fills, 32, "return addresses");
        let barrier = forgets.iter().find(|address| self.at[*address] == "wrmsr").expect("a barrier");
        assert!(
            forgets
                .iter()
                .take_while(|address| *address < barrier)
                .all(|address| self.fills(*address).is_none())
        );
        let fence = *fences.first().unwrap();
        let [back] = self.next(self.after(fence))[..] else { panic!("one way on") };
        assert!(self.at[&back].contains("save_sse"), "{}", self.at[&back]);
        &self.at[&question]
    }
}

/// Returns the target of a branch.
fn target(instruction: &str) -> Option<u64> {
    let operand = instruction.split_whitespace().nth(1)?;
    u64::from_str_radix(operand, 16).ok()
}

/// Answers exits that user mode and guests can force without a return and without an indirect
/// branch (HARDWARE A-18), from VMRUN to the next VMRUN. Predictions are discarded before any call,
/// if memory may be mapped.
#[test]
fn forced_exits_run_straight() {
    for variant in Variant::ALL {
        let code = Code::of(variant);
        let run = code.start("3svm3run6switch3run");
        // The loops of the system and of its guests.
        for function in [run, code.start("3svm3run6switch3kvm")] {
            let end = code.starts.values().copied().filter(|start| *start > function).min().unwrap();
            let entries: Vec<_> =
                code.from(function).filter(|(at, text)| *at < end && *text == "vmrun").collect();
            let [(entry, _)] = entries[..] else { panic!("{entries:?}") };
            assert_eq!(
                code.check_exit(code.after(entry), &["vmrun"]),
                code.check_exit(code.start("3vmx3run6switch4exit"), VMX_ENTRIES)
            );
        }
        // VMMCALL in user mode, which costs nothing else.
        let entry = code.from(run).find(|(_, text)| *text == "vmrun").unwrap().0;
        let back = code.from(entry).position(|(_, text)| text.starts_with("jmp")).unwrap();
        assert!(back < 20, "{back} instructions");
    }
}

const VMX_ENTRIES: &[&str] = &["vmresume", "vmlaunch"];

/// Answers CPUID in the same way on Intel, where every program forces its exit. The path goes from
/// the exit to the next entry, with an NMI on the way, and includes a failed entry.
#[test]
fn forced_exits_run_straight_on_intel() {
    for variant in Variant::ALL {
        let code = Code::of(variant);
        let exit = code.start("3vmx3run6switch4exit");
        code.check_exit(exit, VMX_ENTRIES);
        // Failed entries fall through.
        code.check_exit(exit, &[]);
        let answered = code.from(exit).position(|(_, text)| text.starts_with("jmp")).unwrap();
        assert!(answered < 60, "{answered} instructions");
    }
}

/// Overwrites the system's data in the processor's buffers before user mode or a guest runs again.
#[test]
fn buffers_are_emptied_before_the_guest() {
    for variant in Variant::ALL {
        let code = Code::of(variant);
        let run = code.start("3svm3run6switch3run");
        let handled =
            code.from(run).find(|(_, text)| text.starts_with("call") && text.contains("svm_exit")).unwrap();
        let behind: Vec<_> = code.from(handled.0).map(|(_, text)| text).skip(1).take(5).collect();
        assert!(
            behind[2].starts_with("je") && behind[3].starts_with("verw") && behind[4].starts_with("jmp"),
            "{behind:?}"
        );
        let enter = code.start("3vmx3run6switch5enter");
        let position = |what: &str| code.from(enter).position(|(_, text)| text.starts_with(what)).unwrap();
        assert!(position("verw") < position("vmresume"));
    }
}

/// An exit of user mode that ends in a detach goes back by IRET in the driver's gate.
#[test]
fn buffers_are_emptied_on_the_way_out_to_user_mode() {
    let kernel = For::stock(Kernel::BookwormCloud).unwrap();
    let module = driver::build(&kernel, Variant::Production, image(Variant::Production)).unwrap();
    let gates = disassembled(&module);
    for gate in ["mercury_svm_leave", "mercury_vmx_leave"] {
        let code = &gates[gate];
        let returns: Vec<_> = code.iter().enumerate().filter(|(_, line)| line.starts_with("iretq")).collect();
        assert!(!returns.is_empty(), "{gate}: {code:?}");
        for (index, _) in returns {
            assert!(code[index - 1].starts_with("verw"), "{gate}: {:?}", &code[..=index]);
        }
    }
}

/// Has no indirect branch in answers to exits on Intel's processors, where under a snapshot only
/// the return predictor is made harmless. A panic, which ends an attachment, may have one.
#[test]
fn answers_to_exits_have_no_indirect_branch() {
    let functions = functions();
    for exit in ["3svm5exits8svm_exit", "3vmx5exits8vmx_exit", "5entry8save_sse", "5entry11restore_sse"] {
        let reachable = reachable(&functions, named(&functions, exit));
        for name in reachable.iter().filter(|name| !name.contains("panic") && !name.contains("4core3fmt")) {
            let branch =
                |line: &&String| (line.starts_with("call") || line.starts_with('j')) && line.contains('*');
            assert_eq!(functions[*name].iter().find(branch), None, "in {name}, from {exit}");
        }
    }
}

/// Has only relative relocations, since the driver applies no others at load.
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

/// Keeps text, data and stand-in pages small enough to be pre-cached on every machine.
#[test]
fn image_is_small() {
    let image = std::fs::read(image(Variant::Production)).unwrap();
    assert!(image.len() <= 186 << 10, "{} bytes", image.len());
}
