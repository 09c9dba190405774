import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.group.api.assignor.PartitionAssignor;
import org.apache.kafka.coordinator.group.api.assignor.SubscribedTopicDescriber;
import org.apache.kafka.coordinator.group.api.assignor.SubscriptionType;
import org.apache.kafka.coordinator.group.assignor.RangeAssignor;
import org.apache.kafka.coordinator.group.assignor.SimpleAssignor;
import org.apache.kafka.coordinator.group.assignor.UniformAssignor;
import org.apache.kafka.coordinator.group.modern.Assignment;
import org.apache.kafka.coordinator.group.modern.GroupSpecImpl;
import org.apache.kafka.coordinator.group.modern.MemberSubscriptionAndAssignmentImpl;

/**
 * Apache Kafka's assignors, as an oracle of a test over standard input and output.
 *
 * A request is one line: id, assignor, scenario, separated by tabs; the scenario is "=" and Base64. A response is one line:
 * the id, "ok" and the assignment in the same encoding. A scenario has one line for each topic, "T number partitions", and for
 * each member, "M name instance topics assigned", where "-" is null or empty. An assignment has lines "name partitions".
 * Topics are numbers, partitions are "topic:index", and lists have commas.
 */
public final class Assignors {
    private static final Map<String, PartitionAssignor> BY_NAME =
        Map.of("uniform", new UniformAssignor(), "range", new RangeAssignor(), "simple", new SimpleAssignor());

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.US_ASCII);
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            String[] parts = line.split("\t");
            String scenario = new String(Base64.getDecoder().decode(parts[2].substring(1)), StandardCharsets.US_ASCII);
            String answer = assign(BY_NAME.get(parts[1]), scenario);
            String encoded = Base64.getEncoder().encodeToString(answer.getBytes(StandardCharsets.US_ASCII));
            answers.println(parts[0] + "\tok\t=" + encoded);
        }
    }

    private static Uuid topic(String number) {
        return new Uuid(0, Long.parseLong(number) + 100);
    }

    private static String assign(PartitionAssignor assignor, String scenario) {
        Map<Uuid, Integer> counts = new HashMap<>();
        Map<String, MemberSubscriptionAndAssignmentImpl> members = new HashMap<>();
        Map<Uuid, Map<Integer, String>> owners = new HashMap<>();
        Set<Set<Uuid>> subscriptions = new HashSet<>();
        for (String line : scenario.split("\n")) {
            String[] words = line.split(" ");
            if (words[0].equals("T")) {
                counts.put(topic(words[1]), Integer.valueOf(words[2]));
                continue;
            }
            Set<Uuid> topics = new HashSet<>();
            for (String number : list(words[3])) {
                topics.add(topic(number));
            }
            Map<Uuid, Set<Integer>> assigned = new HashMap<>();
            for (String partition : list(words[4])) {
                String[] both = partition.split(":");
                int index = Integer.parseInt(both[1]);
                assigned.computeIfAbsent(topic(both[0]), key -> new HashSet<>()).add(index);
                owners.computeIfAbsent(topic(both[0]), key -> new HashMap<>()).put(index, words[1]);
            }
            subscriptions.add(topics);
            Optional<String> instance = words[2].equals("-") ? Optional.empty() : Optional.of(words[2]);
            members.put(words[1], new MemberSubscriptionAndAssignmentImpl(
                Optional.empty(), instance, topics, new Assignment(assigned)));
        }
        SubscriptionType type =
            subscriptions.size() == 1 ? SubscriptionType.HOMOGENEOUS : SubscriptionType.HETEROGENEOUS;
        SubscribedTopicDescriber describer = new SubscribedTopicDescriber() {
            @Override
            public int numPartitions(Uuid id) {
                return counts.getOrDefault(id, -1);
            }

            @Override
            public Set<String> racksForPartition(Uuid id, int index) {
                return Set.of();
            }
        };
        StringBuilder answer = new StringBuilder();
        var target = assignor.assign(new GroupSpecImpl(members, type, owners), describer);
        new TreeMap<>(target.members()).forEach((name, assignment) -> {
            answer.append(name).append(' ');
            String separator = "";
            for (var entry : assignment.partitions().entrySet()) {
                for (int index : entry.getValue()) {
                    answer.append(separator).append(entry.getKey().getLeastSignificantBits() - 100).append(':').append(index);
                    separator = ",";
                }
            }
            answer.append('\n');
        });
        return answer.toString();
    }

    private static String[] list(String text) {
        return text.equals("-") ? new String[0] : text.split(",");
    }
}
