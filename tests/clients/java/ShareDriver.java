import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Java's share consumers, driven by a test over standard input and output with the line protocol of KafkaDriver.
 *
 * "open name settings topic", "poll name milliseconds" (partition, offset, value and delivery count of each record),
 * "ack name partition offset type" (of a record of the last poll), "commit name" (the error codes of partitions),
 * "close name". Requests of one consumer come one at a time.
 */
public final class ShareDriver {
    private static final PrintStream OUT = System.out;
    private static final Map<String, KafkaShareConsumer<byte[], byte[]>> MEMBERS = new ConcurrentHashMap<>();
    private static final Map<String, Map<String, ConsumerRecord<byte[], byte[]>>> POLLED = new ConcurrentHashMap<>();

    public static void main(String[] arguments) throws Exception {
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String[] parts = line.split("\t");
            workers.execute(() -> answer(parts));
        }
        System.exit(0);
    }

    private static void answer(String[] parts) {
        StringBuilder answer = new StringBuilder(parts[0]);
        try {
            answer.append("\tok");
            handle(parts, answer);
        } catch (Throwable failure) {
            int code = failure instanceof KafkaException ? Errors.forException(failure).code() : -1;
            answer.setLength(0);
            add(add(answer.append(parts[0]).append("\terror"), code), failure);
        }
        synchronized (OUT) {
            OUT.println(answer);
            OUT.flush();
        }
    }

    private static void handle(String[] parts, StringBuilder answer) {
        String name = text(parts, 2);
        KafkaShareConsumer<byte[], byte[]> member = MEMBERS.get(name);
        switch (parts[1]) {
            case "open" -> {
                int count = Integer.parseInt(text(parts, 3));
                Properties settings = new Properties();
                for (int at = 4; at < 4 + count; at += 2) {
                    settings.setProperty(text(parts, at), text(parts, at + 1));
                }
                member = new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
                member.subscribe(List.of(text(parts, 4 + count)));
                MEMBERS.put(name, member);
            }
            case "poll" -> {
                var records = member.poll(Duration.ofMillis(Long.parseLong(text(parts, 3))));
                add(answer, records.count());
                Map<String, ConsumerRecord<byte[], byte[]>> polled = new HashMap<>();
                POLLED.put(name, polled);
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    polled.put(record.partition() + "-" + record.offset(), record);
                    add(add(answer, record.partition()), record.offset());
                    add(answer, new String(record.value(), StandardCharsets.UTF_8));
                    add(answer, record.deliveryCount().get());
                }
            }
            case "ack" -> member.acknowledge(
                POLLED.get(name).get(text(parts, 3) + "-" + text(parts, 4)), AcknowledgeType.valueOf(text(parts, 5)));
            case "commit" -> {
                Map<TopicIdPartition, Optional<KafkaException>> outcome = member.commitSync();
                add(answer, outcome.size());
                for (Optional<KafkaException> error : outcome.values()) {
                    add(answer, error.map(one -> (int) Errors.forException(one).code()).orElse(0));
                }
            }
            case "close" -> MEMBERS.remove(name).close();
            default -> throw new IllegalArgumentException(parts[1]);
        }
    }

    private static String text(String[] parts, int at) {
        return new String(Base64.getDecoder().decode(parts[at].substring(1)), StandardCharsets.UTF_8);
    }

    private static StringBuilder add(StringBuilder answer, Object value) {
        byte[] bytes = String.valueOf(value).getBytes(StandardCharsets.UTF_8);
        return answer.append("\t=").append(Base64.getEncoder().encodeToString(bytes));
    }
}
