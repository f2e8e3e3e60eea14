//! Moves the server's times in responses, which simulates a machine that was paused: all of its
//! clocks have stood still together.

use syncguard::firestore::tonic::codegen::Bytes;

/// Returns the number of the field with the server's time in the response to a method.
pub(crate) fn field_of(method: &str) -> Option<u64> {
    match method {
        "Commit" => Some(2),
        "RunQuery" => Some(3),
        "BatchGetDocuments" => Some(4),
        _ => None,
    }
}

/// Moves the time in every message of a frame. The encoded time keeps its length.
pub(crate) fn moved(frame: &Bytes, field: u64, by_secs: u64) -> Bytes {
    const PREFIX: usize = 5;
    let mut bytes = frame.to_vec();
    let mut start = 0;
    while start + PREFIX <= bytes.len() {
        let length = u32::from_be_bytes(bytes[start + 1..start + PREFIX].try_into().expect("four"));
        let end = start + PREFIX + usize::try_from(length).expect("small");
        move_message(&mut bytes[start + PREFIX..end], field, by_secs);
        start = end;
    }
    bytes.into()
}

fn move_message(message: &mut [u8], field: u64, by_secs: u64) {
    let mut place = 0;
    while place < message.len() {
        let tag = varint(message, &mut place);
        if tag.is_multiple_of(8) {
            varint(message, &mut place);
            continue;
        }
        assert_eq!(tag % 8, 2, "a number, a message or bytes");
        let length = usize::try_from(varint(message, &mut place)).expect("small");
        if tag / 8 == field {
            // The seconds are the first field of a timestamp.
            let time = &mut message[place..place + length];
            let mut start = 0;
            assert_eq!(varint(time, &mut start), 8);
            let mut end = start;
            let mut seconds = varint(time, &mut end) + by_secs;
            for byte in &mut time[start..end] {
                *byte = *byte & 0x80 | u8::try_from(seconds % 0x80).expect("seven bits");
                seconds /= 0x80;
            }
        }
        place += length;
    }
}

fn varint(bytes: &[u8], place: &mut usize) -> u64 {
    let (mut number, mut shift) = (0, 0);
    loop {
        let byte = bytes[*place];
        *place += 1;
        number |= u64::from(byte & 0x7F) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return number;
        }
    }
}
